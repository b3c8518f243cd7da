"""What people bring, as data: the rows of docs/exactness.md."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
from torch import nn

import zero_trial
from tests.exactness.measure import RATE, Row, square
from tests.support import pipelines
from tests.support.dense import Turn
from tests.support.models import Block, Tower
from tests.support.whole_optimizers import (
    GlobalNorm,
    LayerWise,
    MuonAndAdamW,
    MuonLike,
    ScheduleFree,
    ShampooLike,
    muon_by_group,
)
from zero_trial.zero import GatheredParameters, safe_get_full_fp32_param

# --- optimizers -----------------------------------------------------------------------------------

MUON = {"type": "Muon", "params": {"muon_lr": 2 * RATE, "adam_lr": RATE, "eps": 1e-3, "weight_decay": 0.1}}


def muon_and_adamw(params: Any) -> torch.optim.Optimizer:
    """Return torch's two, as `MUON` says."""
    return MuonAndAdamW(params, lr=RATE)


def schedule_free(params: Any) -> torch.optim.Optimizer:
    """Return a schedule-free optimizer that is ready to train."""
    optimizer = ScheduleFree(params, lr=0.05)
    optimizer.train()
    return optimizer


def hf_adafactor(params: Any) -> torch.optim.Optimizer:
    """Return Hugging Face's Adafactor with its defaults: it chooses its own rate."""
    from transformers.optimization import Adafactor

    return Adafactor(params)


def adamw_8bit(params: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit states for tensors of every size."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=RATE, eps=1e-3, min_8bit_size=1)


def client(name: str, make: Any, **more: Any) -> Row:
    """Return the row of an optimizer that is passed to ``initialize`` as a callable."""
    return Row(name=name, optimizer=make, plain=make, clip=0.2, **more)


OPTIMIZERS = [
    Row(name="AdamW from ds_config", clip=0.2),
    Row(name="Muon from ds_config (torch.optim.Muon + AdamW)", optimizer=MUON, plain=muon_and_adamw, clip=0.2),
    client("torch.optim.Muon and AdamW in one class", muon_and_adamw),
    client("custom class with Muon and AdamW, chosen by `use_muon`", lambda params: muon_by_group(params, RATE)),
    client("custom Muon", lambda params: MuonLike(params)),
    client("Shampoo-like", lambda params: ShampooLike(params)),
    client("torch.optim.Adafactor", lambda params: torch.optim.Adafactor(params, lr=0.01)),
    client("Hugging Face's Adafactor", hf_adafactor, needs="transformers"),
    client("layer-wise (LARS)", lambda params: LayerWise(params)),
    client("global norm in the step", lambda params: GlobalNorm(params)),
    client("schedule-free", schedule_free),
    client("bitsandbytes' AdamW8bit", adamw_8bit, needs="bitsandbytes"),
    Row(
        name='`optimizer_states: "bf16"`',
        config={"data_types": {"optimizer_states": "bf16"}},
        limits={"fp32": 0.1, "bf16": 0.1},
        remark="compared with torch's AdamW with fp32 states: stored states are rounded stochastically",
    ),
]

# Muon's iteration is in bfloat16: a gradient that differs in its last fp32 bit may be another
# bfloat16 number, and small singular values, which the iteration raises, pass that on at full
# length. Sums of a pipeline have another order from the first step on.
IN_FP32 = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


def muon(name: str, **more: Any) -> Row:
    """Return a row of Muon on another mesh than two shards."""
    return Row(name=f"Muon, {name}", optimizer=MUON, plain=muon_and_adamw, **more)


def piped(name: str, **more: Any) -> Row:
    """Return a row of Muon in a pipeline of two stages, with two micro-batches per step."""
    layers = pipelines.layers(2, tied=False)
    return muon(name, build=lambda: layers, stages=2, accumulation=2, **more)


LATER = (
    "a pipeline's sums differ in the last bit, and Muon's bfloat16 iteration magnifies this: plain torch differs as "
    "much (2e-2) from itself if its gradients change by a relative 6e-8"
)

MUON_MESHES = [
    muon("4 ranks", ranks=4),
    muon(
        "2 shards x 2 replicas, accumulation 2",
        ranks=4,
        accumulation=2,
        config={"mesh": {"shard": 2, "replica": 2}},
        remark="stage 0 has no shards",
    ),
    piped("1F1B, iteration in fp32 on both sides", around=lambda: IN_FP32),
    piped("1F1B on 2 x 2 ranks, iteration in fp32 on both sides", around=lambda: IN_FP32, ranks=4),
    piped("1F1B", limits={"fp32": 0.1}, remark=LATER),
]

# --- losses ---------------------------------------------------------------------------------------


def two_losses(model: Any, turn: Turn) -> None:
    """Call backward for two losses of one forward."""
    out = model(turn.normal(4, 5)).float()
    out.square().mean().backward(retain_graph=True)
    (out - 1).abs().mean().backward()


def not_a_scalar(model: Any, turn: Turn) -> None:
    """Call backward of an output with its gradient."""
    out = model(turn.normal(4, 5)).float()
    out.backward(gradient=turn.normal(4, 4))


def lengths(step: int, number: int, rank: int) -> int:
    """Return how many tokens a micro-batch has."""
    return 2 + (3 * step + 5 * number + 4 * rank) % 7


def summed(model: Any, turn: Turn) -> torch.Tensor:
    """Return the sum of the losses of all tokens of a micro-batch."""
    count = lengths(turn.step, turn.turn, turn.rank)
    return (model(turn.normal(count, 5)).float() - 1).square().mean(-1).sum()


def by_tokens(engine: Any, turn: Turn) -> None:
    """Give the engine the sum and the number of tokens."""
    engine.backward(summed(engine, turn), weight=lengths(turn.step, turn.turn, turn.rank))


LOSSES = [
    Row(name="`loss.backward()`", backward=lambda engine, turn: square(engine, turn).backward()),
    Row(name="`loss.backward()`, accumulation 2", backward=lambda engine, turn: square(engine, turn).backward(), accumulation=2),
    Row(
        name="two losses, each with `backward()`",
        backward=two_losses,
        plain_backward=two_losses,
        remark="bf16: losses and ranks are summed in a different order",
    ),
    Row(name="`out.backward(gradient=...)`, non-scalar output", backward=not_a_scalar, plain_backward=not_a_scalar),
    Row(
        name="`engine.backward(loss_sum, weight=tokens)`, accumulation 2",
        loss=summed,
        backward=by_tokens,
        share=lambda step: 1 / sum(lengths(step, number, rank) for number in range(2) for rank in range(2)),
        accumulation=2,
    ),
]  # fmt: skip

# --- gradients ------------------------------------------------------------------------------------


def clip_norm(module: nn.Module) -> None:
    """Clip as scripts do."""
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def scale_by_three(module: nn.Module) -> None:
    """Change one gradient in place."""
    module.get_parameter("blocks.1.weight").grad *= 3.0  # type: ignore[operator]


ONLY_WHOLE = "stages 2 and 3 do not keep full gradients: the error names an alternative"

GRADIENTS = [
    Row(name="`gradient_clipping`", clip=0.05),
    Row(name="`clip_grad_norm_(model.parameters(), c)`", edit=clip_norm, remark=ONLY_WHOLE),
    Row(name="`p.grad *= 3`", edit=scale_by_three, remark=ONLY_WHOLE),
]

# --- torch.compile --------------------------------------------------------------------------------

AOT = {"backend": "aot_eager"}


class Stack(nn.Module):
    """Two blocks of several layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the model in place."""
    model.compile(**AOT, **options)
    return model


def by_block(model: nn.Module) -> nn.Module:
    """Compile each block in place."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(**AOT, fullgraph=True)
    return model


def compiled(name: str, **more: Any) -> Row:
    """Return a row of compiling, beside plain torch without a compiler."""
    return Row(name=name, build=Stack, compiles=True, **more)


COMPILED = [
    compiled("`model.compile()`", before=in_place),
    compiled("`torch.compile(model)`", before=lambda model: torch.compile(model, **AOT)),
    compiled("`block.compile(fullgraph=True)`", before=by_block),
    compiled("`engine.compile()`", after=lambda engine: engine.compile(**AOT)),
    compiled(
        "`model.compile(fullgraph=True)`",
        before=lambda model: in_place(model, fullgraph=True),
        raises=("Unsupported",),
        remark="a stage-3 model gathers its blocks one by one, so it is not one graph: torch's error ends with the alternatives",
    ),
]

# --- architectures --------------------------------------------------------------------------------


class Words(nn.Module):
    """A model of Hugging Face as a function of tokens that returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def words(model: Any, turn: Turn) -> torch.Tensor:
    """Return the loss on random tokens."""
    return model((turn.normal(2, 9) * 1000).long().remainder(31) + 1)


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SMALL | {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 64}


GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
BERT = SMALL | {"intermediate_size": 24, "max_position_embeddings": 16}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Mixtral (experts)": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "output_router_logits": True}),
    "BERT": ("BertForMaskedLM", BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "T5": ("T5ForConditionalGeneration", T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "ViT": (
        "ViTForImageClassification",
        VIT | {"intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 5},
    ),
}


def library_model(name: str, **more: Any) -> Any:
    """Return a small model of transformers."""
    import transformers

    kind, shape = LIBRARY[name]
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**shape | more))


def of_library(name: str) -> Row:
    """Return the row of such a model."""
    if name == "ViT":
        return Row(name=name, build=lambda: library_model(name), loss=images, needs="transformers")
    return Row(name=name, build=lambda: Words(library_model(name)), loss=words, needs="transformers")


def images(model: Any, turn: Turn) -> torch.Tensor:
    out = model(pixel_values=turn.normal(2, 3, 8, 8), labels=torch.tensor([1, 3]))
    return out.loss


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return Words(get_peft_model(library_model("Llama"), chosen))  # type: ignore[arg-type]


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(**sizes, **blocks, block_out_channels=(8, 16), attention_head_dim=4)


def noise(model: Any, turn: Turn) -> torch.Tensor:
    """Return the loss of a denoising step."""
    image = turn.normal(2, 1, 8, 8)
    return (model(image, torch.tensor([3, 7])).sample.float() - image).square().mean()


class Rotary(nn.Module):
    """Turns its input by position 4096, where bf16 frequencies are most of a radian off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(4) / 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = 4096 * self.inv_freq  # type: ignore[operator]
        a, b = self.first(x).float().chunk(2, -1)
        turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        return self.last(turned.to(x.dtype))


ARCHITECTURES = [
    *map(of_library, LIBRARY),
    Row(name="peft's LoRA on Llama", build=lora, loss=words, needs="peft"),
    Row(name="diffusers' UNet2DModel", build=unet, loss=noise, needs="diffusers"),
    Row(name="rotary frequencies at position 4096", build=Rotary),
]

# --- copies ---------------------------------------------------------------------------------------


def copied(module: nn.Module, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters of a copy of the model."""
    return dict(copy.deepcopy(module).named_parameters())


def averaged(module: nn.Module, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of torch's AveragedModel, updated after each step."""
    if "model" not in memory:
        memory["model"] = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
    memory["model"].update_parameters(module)
    return dict(memory["model"].module.named_parameters())


def arithmetic(module: nn.Module, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return twice a weight of the model, read after the step."""
    return {"twice": module.get_parameter("blocks.1.weight").detach() * 2}


def average(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    """Return the averages that ds_config's ``ema`` keeps."""
    with engine.ema_weights():
        return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}


def plain_average(model: nn.Module, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the same of fp32 weights in plain torch."""
    for name, param in model.named_parameters():
        memory.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.5)
    return memory


class Generating(Words):
    """The same, and it generates."""

    def generate(self, **options: Any) -> torch.Tensor:
        """Return the scores of each token that the model chooses, (tokens, prompts, vocabulary)."""
        prompts = torch.tensor([[1, 5, 9], [2, 3, 4]])
        asked = {"do_sample": False, "pad_token_id": 0, "output_scores": True, "return_dict_in_generate": True}
        given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        found = self.model.generate(**given, **asked, **options)  # type: ignore[operator]
        return torch.stack(found.scores)


def generating() -> nn.Module:
    return Generating(library_model("Llama", eos_token_id=None))


def _length(rank: int) -> dict[str, int]:
    return {"min_new_tokens": 3 + 2 * rank, "max_new_tokens": 3 + 2 * rank}


def generated(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    """Return what all ranks have generated, each another number of tokens."""
    return _of_all_ranks({f"rank {engine.global_rank}": engine.generate(**_length(engine.global_rank))})


def plain_generated(model: Any, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the same of plain torch."""
    with torch.no_grad():
        return {f"rank {rank}": model.generate(**_length(rank)) for rank in range(2)}


def _of_all_ranks(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return {name: value for each in everyone for name, value in each.items()}


def evaluated(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    """Return the sum of the losses of three batches on rank 0 and two on rank 1."""
    rank, total = engine.global_rank, torch.zeros(())
    with torch.no_grad():
        for turn, weight in engine.evenly([Turn(7, number, rank) for number in range(3 - rank)]):
            total += square(engine, turn) * weight
    torch.distributed.all_reduce(total)
    return {"loss": total}


def plain_evaluated(model: nn.Module, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the same of plain torch."""
    with torch.no_grad():
        losses = [square(model, Turn(7, number, rank)) for rank in range(2) for number in range(3 - rank)]
    return {"loss": torch.stack(losses).sum()}


def adapter(module: Any, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what peft saves of the model: the adapters alone."""
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(module.model))


def merged(module: Any, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a copy whose adapters are merged into the layers."""
    return dict(copy.deepcopy(module.model).merge_and_unload().named_parameters())


def merged_of_engine(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    """Return the same of a model whose parameters are gathered for it."""
    with GatheredParameters(list(engine.module.parameters())):
        return merged(engine.module, {})


class Unused(Tower):
    """Has a layer that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


FREED = "at stage 3, freed parameters have no values: the error names them and suggests GatheredParameters"

COPIES = [
    Row(name="`copy.deepcopy(model)`", use=copied, remark=FREED),
    Row(
        name="`ema` in ds_config, compared with AveragedModel",
        use=plain_average,
        engine_use=average,
        config={"ema": {"decay": 0.5}},
        limits={"bf16": 5e-2},
        remark="bf16: an average of fp32 masters is compared with one of bf16 weights",
    ),
    Row(name="torch's AveragedModel", use=averaged, remark=FREED),
    Row(
        name="`engine.generate`, a different number of tokens on each rank",
        build=generating,
        loss=words,
        use=plain_generated,
        engine_use=generated,
        needs="transformers",
        limits={"fp32": 1e-4},
        remark="a score accumulates the differences of all weights",
    ),
    Row(name="evaluation with `engine.evenly`, one extra batch on one rank", use=plain_evaluated, engine_use=evaluated),
    Row(name="peft adapters, as peft saves them", build=lora, loss=words, use=adapter, needs="peft"),
    Row(
        name="peft's `merge_and_unload` on a copy, inside GatheredParameters",
        build=lora,
        loss=words,
        use=merged,
        engine_use=merged_of_engine,
        needs="peft",
    ),
    Row(name="arithmetic with a parameter", use=arithmetic, remark=FREED),
    Row(
        name="a layer that no batch reaches",
        build=Unused,
        limits={"fp32": 0.1, "bf16": 0.1},
        remark="its gradient counts as zero, so weight decay still applies, while torch skips the layer; a log line reports this",
    ),
]  # fmt: skip

SECTIONS: dict[str, list[Row]] = {
    "Optimizers": OPTIMIZERS,
    "Muon on other meshes": MUON_MESHES,
    "Losses": LOSSES,
    "Gradients": GRADIENTS,
    "torch.compile": COMPILED,
    "Architectures": ARCHITECTURES,
    "Copies and reads": COPIES,
}
