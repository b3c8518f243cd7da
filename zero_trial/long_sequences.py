"""Losses and MLPs of long sequences in parts, so that neither all logits nor all activations of an
MLP exist at one time.

    chunked_cross_entropy   the loss of a head, some rows at a time
    tiled                   a module that runs on parts of its sequence, computed again in backward
    long_samples            both, in a Hugging Face causal model

A weight is gathered as for the plain module: the parts run inside the forward that uses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from zero_trial.errors import ConfigError, TrialError

Module = TypeVar("Module", bound=nn.Module)

LOGITS = 1 << 26  # that exist at one time, unless ``rows`` asks for others
UNDERFLOW = -87.0  # exp of less is subnormal in fp32, or 0


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
) -> torch.Tensor:
    """Return ``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` in fp32, without all
    logits in memory.

    The forward also computes the gradients, chunk by chunk, and keeps them for backward, so each
    matrix product is computed once, as in the plain loss. With N rows, hidden size H, vocabulary V,
    chunks of r rows and b bytes per element of ``weight`` and ``hidden``, the peak bytes in
    addition to the arguments are, in fp32 (b = 4):

        here      4 (r V + V H + N H), and 8 (V H + N H) in backward if that is more
        plain     12 N V: the log softmax, its gradient and the gradient of the logits

    In 16 bits, each logit of a chunk costs 4 + b bytes and a gradient of the weight 4, because sums
    over chunks are in fp32. Without gradients (evaluation, a frozen weight), their terms are zero.

    Args:
        hidden: (..., H).
        weight: (V, H), such as ``head.weight``. At ZeRO stage 3, call this inside the forward of
            the model, or of a module that owns the weight and is gathered as a whole.
        labels: (...), class indices; labels equal to ``ignore_index`` are ignored.
        reduction: "mean" over the labels that are not ignored, or "sum".
        rows: rows per chunk; by default as many as make 2**26 logits, 256 MiB.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            "no such reduction", where="chunked_cross_entropy(reduction)", got=reduction, expected="mean or sum"
        )
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise TrialError(
            "the shapes do not match",
            where="chunked_cross_entropy",
            got=f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}",
            expected="hidden (..., H), weight (V, H), labels (...)",
        )
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():  # needs_input_grad does not know
        hidden, weight, bias = hidden.detach(), weight.detach(), bias if bias is None else bias.detach()
    rows = rows or max(1, LOGITS // weight.shape[0])
    with torch.autocast(kind, enabled=False):
        loss: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            labels.flatten(),
            ignore_index,
            label_smoothing,
            reduction,
            rows,
        )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ignore_index: int,
        smoothing: float,
        reduction: str,
        rows: int,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:3]
        counts = labels != ignore_index
        labels, kept = labels.where(counts, 0)[:, None], counts.float()[:, None]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        total = torch.zeros((), device=hidden.device)

        def add(part: slice) -> None:  # its logits are freed before the next chunk's are there
            logits = F.linear(hidden[part], weight, bias).float()
            logits.sub_(logits.amax(1, keepdim=True))
            loss = logits.gather(1, labels[part]).mul_(smoothing - 1)
            if smoothing:
                loss.sub_(logits.mean(1, keepdim=True), alpha=smoothing)
            if logits.device.type == "cpu":  # torch's exp takes 10 to 35 times as long where it underflows
                logits.clamp_(min=UNDERFLOW)
            sums = logits.exp_().sum(1, keepdim=True)
            total.add_(loss.add_(sums.log()).mul_(kept[part]).sum())
            if not any(wanted):
                return
            logits.mul_(kept[part] / sums)  # from here on the gradient of the logits
            logits.scatter_add_(1, labels[part], kept[part] * (smoothing - 1))
            if smoothing:
                logits.sub_(kept[part], alpha=smoothing / weight.shape[0])
            if of_bias is not None:
                of_bias.add_(logits.sum(0))
            logits = logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            if of_weight is not None and weight.dtype == torch.float32:
                of_weight.addmm_(logits.T, hidden[part])
            elif of_weight is not None:
                of_weight.add_(logits.T @ hidden[part])

        for start in range(0, len(hidden), rows):
            add(slice(start, start + rows))
        # Sums wait, and not means: in fp16 a softmax divided by many rows would round to zero.
        count = kept.sum() if reduction == "mean" else torch.ones_like(total)
        ctx.dtypes = [each.dtype if each is not None else None for each in (hidden, weight, bias)]
        ctx.save_for_backward(of_hidden, of_weight, of_bias, count.clamp(min=1))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *sums, count = ctx.saved_tensors
        factor = gradient / count
        found = (
            None if each is None else (each * factor).to(dtype) for each, dtype in zip(sums, ctx.dtypes, strict=True)
        )
        return (*found, None, None, None, None, None)


def tiled(module: Module, tiles: int) -> Module:
    """Make ``module`` process its first argument (..., tokens, features) in ``tiles`` parts, and
    return the module.

    Use it for modules that process each token independently, such as an MLP. A part's activations
    exist only while the part is computed, and are recomputed in backward: at most 1/tiles of them
    at a time, for one additional forward of the module. Parameters keep their names. Hooks, and so
    the gathers of ZeRO stage 3, run once around the loop.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise ConfigError("not a number of tiles", where="tiled(tiles)", got=repr(tiles), expected="1 or more")
    own = vars(module).get("forward")
    if isinstance(own, partial) and own.func is _in_tiles:
        own = own.args[0]  # a new number replaces the old one
    vars(module)["forward"] = partial(_in_tiles, own or module.forward, tiles)
    return module


def _in_tiles(forward: Callable[..., Any], tiles: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    count = min(tiles, x.shape[-2])
    run = partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
    parts = [run(part, *args, **kwargs) for part in x.tensor_split(count, dim=-2)] if count > 1 else []
    if not parts:
        return forward(x, *args, **kwargs)  # type: ignore[no-any-return]
    wrong = next((part for part in parts if not isinstance(part, torch.Tensor)), None)
    if wrong is not None:
        raise TrialError(
            "a tiled module must return one tensor", where="tiled", got=type(wrong).__name__, expected="a tensor"
        )
    return torch.cat(parts, dim=-2)


def long_samples(model: Module, tiles: int = 8) -> Module:
    """Make a Hugging Face causal model compute its loss in chunks and its MLPs in tiles, and return
    the model.

    Call it before ``initialize`` or ``Trainer`` gets the model. With labels, the model returns the
    loss and empty logits of shape (batch, 0, vocabulary). Without labels, and so in ``generate``,
    the model behaves as before.

    Args:
        model: contains a causal model of transformers (Llama, Mistral, Qwen and others with this
            structure: decoder layers with ``gate_proj``, ``up_proj``, ``down_proj``, and a head
            that is an nn.Linear).
        tiles: the number of tiles of each MLP; 1 leaves the MLPs unchanged.
    """
    causal = next((part for part in model.modules() if hasattr(type(part), "loss_function")), None)
    head = causal.get_output_embeddings() if causal is not None else None  # type: ignore[operator]
    name = getattr(causal.loss_function, "__name__", "") if causal is not None else ""
    if causal is None or type(head) is not nn.Linear or name != "ForCausalLMLoss":
        raise ConfigError(
            "the model has no loss that can be computed in chunks",
            where="long_samples(model)",
            got=f"{type(model).__name__}, head {type(head).__name__}, loss {name or None}",
            expected="a causal model of transformers whose head is an nn.Linear",
            fix="Call zero_trial.chunked_cross_entropy(hidden, head.weight, labels) in the model's forward.",
        )
    projections = ("gate_proj", "up_proj", "down_proj")
    mlps = [
        part
        for part in causal.modules()
        if all(isinstance(vars(part)["_modules"].get(p), nn.Module) for p in projections)
    ]
    if tiles != 1 and not mlps:
        raise ConfigError(
            "the model has no MLPs that can be tiled",
            where="long_samples(model)",
            got=type(causal).__name__,
            expected=f"modules with {', '.join(projections)}",
            fix="Pass tiles=1, and call zero_trial.tiled(module, tiles) on the modules that process each token independently.",
        )
    for mlp in mlps if tiles != 1 else ():
        tiled(mlp, tiles)
    _HeadInLoss(causal, head)
    return model


class _HeadInLoss:
    """Moves the head of a causal model into its loss: with labels, the head gets no rows, and the
    loss function gets what was meant for the head."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self._model, self._head = model, head
        self._has_labels = False
        self._hidden: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        head.register_forward_pre_hook(self._before_head)
        head.register_forward_hook(self._after_head)
        model.loss_function = self.loss  # type: ignore[assignment]

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._has_labels = given.get("labels") is not None
        if self._has_labels and (head := model.get_output_embeddings()) is not self._head:  # type: ignore[operator]
            raise ConfigError(
                "the head was replaced after long_samples()",
                where="long_samples(model)",
                got=type(head).__name__,
                expected="the nn.Linear that long_samples() found",
                fix="Remove the head from the adapter's target_modules and modules_to_save.",
            )

    def _end(self, *_: Any) -> None:
        self._has_labels, self._hidden, self._logits = False, None, None

    def _before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._has_labels:
            return None
        self._hidden = args[0]
        return (self._hidden[:, :0],)

    def _after_head(self, head: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._logits = output

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return what transformers' ``ForCausalLMLoss`` returns."""
        if self._hidden is None or logits is not self._logits:
            raise ConfigError(
                "the model changes its logits before the loss",
                where="long_samples(model)",
                got=type(self._model).__name__,
                expected="loss_function(head(hidden), labels)",
                fix="Use this model with its own loss, and tile its MLPs with zero_trial.tiled(module, tiles).",
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = chunked_cross_entropy(
            self._hidden,
            self._head.weight,
            shift_labels.to(self._hidden.device).view(self._hidden.shape[:-1]),
            self._head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / torch.as_tensor(num_items_in_batch, device=loss.device)
