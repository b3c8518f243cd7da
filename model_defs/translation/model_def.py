"""An encoder-decoder of T5's shape (Raffel et al. 2020) that translates the sentence pairs that
const.yaml names."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from pairs import (
    EOS,
    PAD,
    PairDataset,
    Vocabulary,
    bleu,
    bleu_counts,
    copy_bleu,
    most_frequent_bleu,
    translation_pairs,
)
from torch import Tensor, nn

from zero_trial import ConfigError, DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.trial.metrics import FunctionReducer

BUCKETS, FARTHEST = 32, 128  # of relative positions


class Norm(nn.Module):
    """Root mean square norm without a bias, over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Heads without biases and without the factor 1/sqrt(width of a head), which the initial values
    contain. The first layer of a stack has the bias of relative positions, for all its layers."""

    def __init__(self, width: int, heads: int, has_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for layer, inputs in ((self.q, width * width // heads), (self.k, width), (self.v, width), (self.o, width)):
            nn.init.normal_(layer.weight, std=inputs**-0.5)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, heads)
            nn.init.normal_(self.relative_attention_bias.weight, std=width**-0.5)

    def forward(self, x: Tensor, memory: Tensor, scores: Tensor) -> Tensor:
        """Attend from ``x`` (batch, n, width) to ``memory`` (batch, m, width); ``scores``, what is
        added before the softmax, broadcasts to (batch, heads, n, m)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(memory), self.v(memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=scores.to(q.dtype), scale=1.0)
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found

    def position_scores(self, length: int, causal: bool) -> Tensor:
        """Return (1, heads, length, length) for queries and keys at the same places: by distance
        near by, by its logarithm farther off, each side of its own where both may be seen."""
        places = torch.arange(length, device=self.q.weight.device)
        distance = places[None, :] - places[:, None]
        buckets = BUCKETS if causal else BUCKETS // 2
        side = torch.zeros_like(distance) if causal else (distance > 0).long() * buckets
        far = (-distance).clamp_min(0) if causal else distance.abs()
        exact = buckets // 2
        logs = torch.log(far.float().clamp_min(1) / exact) / math.log(FARTHEST / exact) * (buckets - exact)
        bucket = side + torch.where(far < exact, far, (exact + logs.long()).clamp_max(buckets - 1))
        scores: Tensor = self.relative_attention_bias(bucket).permute(2, 0, 1)[None]
        return scores


class FeedForward(nn.Module):
    """Two linear layers without biases and ReLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        nn.init.normal_(self.wi.weight, std=width**-0.5)
        nn.init.normal_(self.wo.weight, std=hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.wo(F.relu(self.wi(x)))
        return after


class Sublayer(nn.Module):
    """x + dropout(``inner``(norm(x))), where ``inner`` is named as in transformers' T5."""

    def __init__(self, name: str, inner: nn.Module, width: int, dropout: float) -> None:
        super().__init__()
        self.name, self.dropout = name, dropout
        self.layer_norm = Norm(width)
        self.add_module(name, inner)

    def forward(self, x: Tensor, memory: Tensor | None = None, scores: Tensor | None = None) -> Tensor:
        inner, normed = getattr(self, self.name), self.layer_norm(x)
        after = inner(normed) if scores is None else inner(normed, normed if memory is None else memory, scores)
        return x + F.dropout(after, self.dropout, self.training)


class T5Block(nn.Module):
    """Attention to itself, in a decoder to the memory too, and two linear layers."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, decoder: bool, first: bool) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = {"SelfAttention": Attention(width, heads, has_bias=first)}
        if decoder:
            parts["EncDecAttention"] = Attention(width, heads, has_bias=False)
        parts["DenseReluDense"] = FeedForward(width, hidden)
        self.layer = nn.ModuleList(Sublayer(name, part, width, dropout) for name, part in parts.items())

    def forward(self, x: Tensor, scores: Tensor, memory: Tensor | None, memory_scores: Tensor | None) -> Tensor:
        x = self.layer[0](x, scores=scores)
        if memory is not None:
            x = self.layer[1](x, memory, memory_scores)
        after: Tensor = self.layer[-1](x)
        return after


class T5Stack(nn.Module):
    """An encoder or a decoder: (batch, n, width) -> the same."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, dropout: float, decoder: bool) -> None:
        super().__init__()
        self.dropout, self.decoder = dropout, decoder
        self.block = nn.ModuleList(T5Block(width, heads, hidden, dropout, decoder, first=not i) for i in range(layers))
        self.final_layer_norm = Norm(width)

    def forward(
        self, x: Tensor, scores: Tensor, memory: Tensor | None = None, memory_scores: Tensor | None = None
    ) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        first = cast(Attention, self.block[0].get_submodule("layer.0.SelfAttention"))
        positions = first.position_scores(x.shape[1], causal=self.decoder)
        for block in self.block:
            x = block(x, scores + positions, memory, memory_scores)
        return F.dropout(self.final_layer_norm(x), self.dropout, self.training)


class T5(nn.Module):
    """T5 in plain torch, with the names of transformers' T5ForConditionalGeneration, so that the
    weights of one are those of the other. One matrix is the embedding of both sides and the output
    layer."""

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = (T5Stack(layers, width, heads, hidden, dropout, side) for side in (False, True))

    def forward(self, source: Tensor, inputs: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores of the next tokens (batch, m, vocabulary), and the encoder's output,
        which stands for ``source`` (batch, n) if it is given as ``memory``."""
        least = torch.finfo(self.shared.weight.dtype).min
        unseen = torch.zeros(source.shape, device=source.device).masked_fill(source == PAD, least)[:, None, None]
        if memory is None:
            memory = self.encoder(self.shared(source), unseen)
        later = torch.full((inputs.shape[1],) * 2, least, device=source.device).triu(1)
        x = self.decoder(self.shared(inputs), later, memory, unseen)
        return F.linear(x * x.shape[-1] ** -0.5, self.shared.weight), memory


class LibraryT5(nn.Module):
    """transformers' own T5 of the same shape, from the weights of ours, called as ours."""

    def __init__(
        self, own: T5, vocabulary: int, layers: int, heads: int, width: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"vocab_size": vocabulary, "d_model": width, "d_ff": hidden, "d_kv": width // heads}
        counts = {"num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "dropout_rate": dropout}
        config = T5Config(**sizes, **counts, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD)
        self.t5 = T5ForConditionalGeneration(config)
        left_out = self.t5.load_state_dict(own.state_dict(), strict=False)
        tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
        if left_out.unexpected_keys or set(left_out.missing_keys) - tied:
            raise ConfigError(
                "transformers' T5 has different parameters than this model", where="LibraryT5", got=left_out
            )

    def forward(self, source: Tensor, inputs: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        known = {"input_ids": source} if memory is None else {"encoder_outputs": (memory,)}
        found = self.t5(**known, attention_mask=source != PAD, decoder_input_ids=inputs, use_cache=False)
        return found.logits, found.encoder_last_hidden_state


def build_model(implementation: str, **shape: Any) -> nn.Module:
    """Return ``own`` T5, that of ``transformers``, or by ``auto`` the latter where it is
    installed."""
    choices = ("auto", "own", "transformers")
    if implementation not in choices:
        where = "hyperparameters.model.implementation"
        raise ConfigError("no such model", where=where, got=implementation, expected=", ".join(choices))
    installed = importlib.util.find_spec("transformers") is not None
    own = T5(**shape)
    return own if implementation == "own" or (implementation == "auto" and not installed) else LibraryT5(own, **shape)


class TranslationTrial(ZeroTrial):
    """Reports the loss per token in nats and in bits, and BLEU of greedy decoding, on sentences
    that were never trained on."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.length = hp.max_tokens
        self.pairs = translation_pairs(
            data["dataset"], data.get("source"), languages=data["languages"], val_pairs=data["validation_pairs"]
        )
        if self.pairs.instead_of:
            context.note(f"{self.pairs.instead_of} is not on this machine; this run translates {self.pairs.name}")
        shape = dict(hp.model)
        implementation = shape.pop("implementation")
        # the pairs are in the order of a hash: the first ones are a fair sample
        sample = (text for pair in self.pairs.train[:8000] for text in pair)
        self.vocabulary = Vocabulary(sample, shape["vocabulary"])
        shape["vocabulary"] = len(self.vocabulary)
        self.engine = context.initialize(model=build_model(implementation, **shape))
        # validation adds up over batches and ranks: means over all tokens, BLEU of the whole corpus
        self.loss, self.bits = FunctionReducer(mean), FunctionReducer(lambda sums: mean(sums) / math.log(2))
        self.bleu = FunctionReducer(bleu)
        for name, reducer in (("validation_loss", self.loss), ("val_bits_per_token", self.bits), ("bleu", self.bleu)):
            context.wrap_reducer(reducer, name, for_training=False)

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(self.pairs.train, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(self.pairs.val, shuffle=False)

    def loader(self, pairs: Sequence[tuple[str, str]], *, shuffle: bool) -> DataLoader:
        samples = PairDataset(pairs, self.vocabulary, self.length)
        return DataLoader(samples, self.context.get_train_micro_batch_size_per_gpu(), shuffle=shuffle)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Tensor:
        source, target, _ = self.context.to_device(next(dataloader_iter))
        source, target = trimmed(source), trimmed(target)
        loss, tokens = self.summed_loss(source, target)
        self.engine.backward(loss, weight=tokens)  # every token of the global batch counts alike
        self.engine.step()
        return loss.detach() / tokens

    def summed_loss(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of the target's tokens in nats, and how many they are."""
        scores, _ = self.engine(source, F.pad(target[:, :-1], (1, 0), value=PAD))
        loss = F.cross_entropy(scores.flatten(0, 1).float(), target.flatten(), ignore_index=PAD, reduction="sum")
        return loss, (target != PAD).sum()

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        source, target, places = self.context.to_device(next(dataloader_iter))
        loss, tokens = self.summed_loss(source, target)
        self.loss.update([loss.item(), tokens.item()])
        self.bits.update([loss.item(), tokens.item()])
        for mine, place in zip(self.translate(source).tolist(), places.tolist(), strict=True):
            _, reference = self.pairs.val[place]  # whole, also where its tokens are cut
            self.bleu.update(bleu_counts(self.vocabulary.decode(mine), reference))
        return {}

    def translate(self, source: Tensor) -> Tensor:
        """Return the most probable token after token, (batch, max_tokens). Always as many forward
        passes, because at stage 3 all ranks take part in each."""
        source, memory = trimmed(source), None
        found = torch.full((len(source), 1), PAD, device=source.device)
        for _ in range(self.length):
            scores, memory = self.engine(source, found, memory)
            found = torch.cat([found, scores[:, -1:].argmax(-1)], dim=1)
        return found[:, 1:]

    def summary(self) -> dict[str, Any]:
        """Return the baselines on the same sentences, and a description of the pairs."""
        train, val = self.pairs.train, self.pairs.val
        copied, frequent = copy_bleu(val), most_frequent_bleu(train, val)
        return {"copy_bleu": copied, "most_frequent_bleu": frequent, "data": self.pairs.describe()}


def trimmed(side: Tensor) -> Tensor:
    """Return (batch, n) without the columns that are PAD in every row."""
    return side[:, : int((side != PAD).sum(1).max())]


def mean(sums: Sequence[Sequence[float]]) -> float:
    """Return the mean per token of (sum, tokens) of each batch."""
    return sum(total for total, _ in sums) / sum(tokens for _, tokens in sums)
