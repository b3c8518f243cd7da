"""The ops of ``torch.ops.zero_trial`` in one table: what Python, torch's dispatcher and the C
sources agree on.

A row of OPTIMIZERS is one elementwise optimizer step over many tensors. Its op, the op's schema and
registrations, the arguments of the CPU and CUDA kernels and the form in plain torch follow from the
row. The arithmetic of an element is the struct of that name in csrc/include/zt_optimizers.h.

    p           parameters, changed in place; fp32 for the native kernels, any dtype in plain torch
    g           gradients in fp32, bf16 or fp16; multiplied by ``multiplier`` as they are read
    states      in the parameter's dtype, changed in place; bf16 if there are keys
    out         each receives the new parameter rounded to its own dtype (bf16 or fp16); or empty
    key, place  of the noise that rounds states in bf16 (:mod:`zero_trial.ops.plain`), the place of
                a tensor's element 0 in its own tensor; or empty

Numbers that differ between tensors are passed as lists too. All tensors of one step have the same
number of elements, are on one device and do not overlap. Steps run outside of autograd's graph
(``torch.no_grad()``) and do not change the tensors' version counters; sums have no derivative. Ops
raise ConfigError for arguments that break these rules.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zero_trial.ops import reference

# How floats are stored: ZtType of csrc/cpu/kernels.h, ZT_GRADIENT and ZT_OUT of csrc/cuda.
NONE, FP32, BF16, FP16 = -1, 0, 1, 2
CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True, eq=False)
class OptimizerOp:
    """An elementwise optimizer step: one row of the table.

    Args:
        name: of the op without its ending (``adam`` for ``adam_``), and of its line in
            ZT_OPTIMIZERS.
        struct: the struct of csrc/include/zt_optimizers.h.
        states: names of the one or two tensors other than parameter and gradient.
        numbers: arguments with a value per tensor, as written in a schema.
        shared: arguments with one value for all tensors of a call; ``multiplier`` is one of them.
        scalars: (numbers, shared) -> the fields of the struct in their order, computed in double.
        formula: (p, g, states, numbers, shared without the multiplier) -> the new p and states, in
            plain torch.
        blocks: how many blocks of the CUDA kernel a multiprocessor holds at once: as many as
            registers allow without spilling.
    """

    name: str
    struct: str
    states: tuple[str, ...]
    numbers: str
    shared: str
    scalars: Callable[..., tuple[float, ...]]
    formula: Callable[..., Sequence[Tensor]]
    blocks: int = 4

    @property
    def schema(self) -> str:
        """The op's arguments, and which of them it writes."""
        p, *written = [f"Tensor({name}!)[] {name}" for name in ("p", *self.states, "out")]
        lists = self.numbers.replace("float ", "float[] ").replace("bool ", "bool[] ")
        return f"({p}, Tensor[] g, {', '.join(written)}, int[] key, int[] place, {lists}, {self.shared}) -> ()"

    @cached_property
    def number_names(self) -> list[str]:
        return [one.split()[1] for one in self.numbers.split(", ")]

    @cached_property
    def shared_names(self) -> list[str]:
        return [one.split()[1] for one in self.shared.split(", ")]

    @cached_property
    def multiplier_at(self) -> int:
        """The index of the multiplier in the shared arguments."""
        return self.shared_names.index("multiplier")

    @cached_property
    def step_at(self) -> int | None:
        """The index of the step in the numbers, if the formula needs it."""
        return self.number_names.index("step") if "step" in self.number_names else None

    @cached_property
    def fields(self) -> int:
        """The number of floats of the struct."""
        return len(self.scalars(*[0.5] * (len(self.number_names) + len(self.shared_names))))

    def pack(self, *arguments: float) -> bytes:
        """Return the struct that kernels read, from a tensor's own and shared numbers."""
        return pack_floats(self.scalars(*arguments))


def pack_floats(values: Sequence[float]) -> bytes:
    """Round ``values`` to fp32 as C does (too large becomes infinite), and pack them."""
    try:
        return struct.pack(f"{len(values)}f", *values)
    except OverflowError:
        return struct.pack(f"{len(values)}f", *torch.tensor(values, dtype=torch.float64).float().tolist())


def _adam_scalars(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, step: float, multiplier: float, decoupled: bool
) -> tuple[float, ...]:
    return (
        *(multiplier, 1 - beta1, 1 - beta2, lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), eps),
        *((0.0, lr * decay) if decoupled else (decay, 0.0)),
    )


ADAM = OptimizerOp(
    name="adam",  # or AdamW, where ``decoupled``; an infinite step corrects no bias
    struct="ZtAdam",
    states=("m", "v"),
    numbers="float lr, float beta1, float beta2, float eps, float weight_decay, float step",
    shared="float multiplier, bool decoupled",
    scalars=_adam_scalars,
    formula=lambda p, g, m, v, lr, beta1, beta2, eps, decay, step, decoupled: reference.adam(
        p, g, m, v, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, decoupled=decoupled
    ),
)


LION = OptimizerOp(
    name="lion",
    struct="ZtLion",
    states=("m",),
    numbers="float lr, float beta1, float beta2, float weight_decay",
    shared="float multiplier",
    scalars=lambda lr, beta1, beta2, decay, multiplier: (multiplier, 1 - beta1, 1 - beta2, lr, lr * decay),
    formula=lambda p, g, m, lr, beta1, beta2, decay: reference.lion(
        p, g, m, lr=lr, betas=(beta1, beta2), weight_decay=decay
    ),
)

ADAGRAD = OptimizerOp(
    name="adagrad",
    struct="ZtAdagrad",
    states=("s",),
    numbers="float lr, float eps, float weight_decay",  # lr with its decay already in it
    shared="float multiplier",
    scalars=lambda lr, eps, decay, multiplier: (multiplier, lr, eps, decay),
    formula=lambda p, g, s, lr, eps, decay: reference.adagrad(p, g, s, lr=lr, eps=eps, weight_decay=decay),
    blocks=3,
)


def _sgd_scalars(
    lr: float, momentum: float, dampening: float, decay: float, first: bool, nesterov: bool, multiplier: float
) -> tuple[float, ...]:
    old, share = (0.0, 1.0) if first else (momentum, 1 - dampening)
    return (multiplier, lr, decay, old, share, momentum, 0.0 if nesterov else 1.0)


def _sgd(p: Tensor, g: Tensor, b: Tensor, *rest: Any) -> Sequence[Tensor]:
    lr, momentum, dampening, decay, first, nesterov = rest
    settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": decay}
    new, moved = reference.sgd(p, g, None if first else b, nesterov=nesterov, **settings)
    return (new,) if moved is None else (new, moved)


SGD = OptimizerOp(
    name="sgd",
    struct="ZtSgd",
    states=("b",),
    # first: b becomes g, undamped
    numbers="float lr, float momentum, float dampening, float weight_decay, bool first",
    shared="bool nesterov, float multiplier",
    scalars=_sgd_scalars,
    formula=_sgd,
)

OPTIMIZERS = (ADAM, LION, ADAGRAD, SGD)


SCHEMAS = {f"{op.name}_": op.schema for op in OPTIMIZERS} | {"square_sum": "(Tensor x) -> Tensor"}
