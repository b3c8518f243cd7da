"""``torch.ops.zero_trial``: optimizer steps and sums over flat shards, native on CPU where that can be had.

Registered by schema, not by decorator: a call costs microseconds, and FakeTensor and torch.compile know what is written.

    p           parameter, changed in place; fp32 for the native kernels, any dtype in plain torch
    g           gradient in fp32, bf16 or fp16; multiplied by ``multiplier`` as it is read
    m, v, s, b  states in the parameter's dtype, changed in place
    out         receives the new parameter rounded to its own dtype (bf16 or fp16), or None
    found_inf   one-element fp32 tensor; where it is not 0 nothing is changed; or None

All tensors of a call have the same number of elements; a ConfigError says which one has not.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import plain
from zero_trial.ops._native import NONE, TYPES, Native, backend

_OUT = "Tensor({})? out, Tensor? found_inf"
SCHEMAS = {
    "adam_": f"(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, {_OUT.format('d!')}, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, float step, float multiplier, bool decoupled) -> ()",
    "lion_": f"(Tensor(a!) p, Tensor g, Tensor(b!) m, {_OUT.format('c!')}, float lr, float beta1, float beta2, "
    "float weight_decay, float multiplier) -> ()",
    "adagrad_": f"(Tensor(a!) p, Tensor g, Tensor(b!) s, {_OUT.format('c!')}, float lr, float eps, float weight_decay, "
    "float multiplier) -> ()",
    "sgd_": f"(Tensor(a!) p, Tensor g, Tensor(b!) b, {_OUT.format('c!')}, float lr, float momentum, float dampening, "
    "float weight_decay, bool first, bool nesterov, float multiplier) -> ()",
    "square_sum": "(Tensor x) -> Tensor",
}


def takes(p: Tensor, g: Tensor, states: tuple[Tensor, ...], out: Tensor | None, found_inf: Tensor | None) -> bool:
    """Whether the native kernels can work on these tensors. Raises ConfigError where nobody could."""
    n = p.numel()
    for name, tensor in (("gradient", g), ("state", states[0]), ("second state", states[-1]), ("out", out)):
        if tensor is not None and tensor.numel() != n:
            raise ConfigError(
                f"the {name} of an optimizer step has another size than the parameter", got=tensor.numel(), expected=n
            )
    flat = p.is_contiguous() and g.is_contiguous() and all(s.is_contiguous() for s in states)
    fp32 = p.dtype == torch.float32 and all(s.dtype == torch.float32 for s in states)
    low = out is None or (out.is_contiguous() and out.dtype in (torch.bfloat16, torch.float16))
    flag = found_inf is None or (found_inf.dtype == torch.float32 and found_inf.numel() == 1)
    here = all(t is None or t.device.type == "cpu" for t in (g, *states, out, found_inf))
    return flat and fp32 and low and flag and here and g.dtype in TYPES


def adam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    multiplier: float,
    decoupled: bool,
) -> None:
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1."""
    native = backend().native
    if native is None or not takes(p, g, (m, v), out, found_inf):
        plain.adam_(p, g, m, v, out, found_inf, lr, beta1, beta2, eps, weight_decay, step, multiplier, decoupled)
        return
    scalars = (lr, beta1, beta2, eps, weight_decay, 1 - beta1**step, 1 - beta2**step, multiplier)
    states = (m.data_ptr(), v.data_ptr())
    native.library.zt_adam(*_shard(native, p, g), *states, *_results(out, found_inf), *scalars, decoupled)


def lion_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Lion."""
    native = backend().native
    if native is None or not takes(p, g, (m,), out, found_inf):
        plain.lion_(p, g, m, out, found_inf, lr, beta1, beta2, weight_decay, multiplier)
        return
    scalars = (lr, beta1, beta2, weight_decay, multiplier)
    native.library.zt_lion(*_shard(native, p, g), m.data_ptr(), *_results(out, found_inf), *scalars)


def adagrad_(
    p: Tensor,
    g: Tensor,
    s: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    eps: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Adagrad; ``lr`` with its decay already in it."""
    native = backend().native
    if native is None or not takes(p, g, (s,), out, found_inf):
        plain.adagrad_(p, g, s, out, found_inf, lr, eps, weight_decay, multiplier)
        return
    scalars = (lr, eps, weight_decay, multiplier)
    native.library.zt_adagrad(*_shard(native, p, g), s.data_ptr(), *_results(out, found_inf), *scalars)


def sgd_(
    p: Tensor,
    g: Tensor,
    b: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    first: bool,
    nesterov: bool,
    multiplier: float,
) -> None:
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    native = backend().native
    if native is None or not takes(p, g, (b,), out, found_inf):
        plain.sgd_(p, g, b, out, found_inf, lr, momentum, dampening, weight_decay, first, nesterov, multiplier)
        return
    scalars = (lr, momentum, 1.0 if first else 1.0 - dampening, weight_decay, multiplier)
    native.library.zt_sgd(*_shard(native, p, g), b.data_ptr(), *_results(out, found_inf), *scalars, first, nesterov)


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not. Reads ``x`` once."""
    native = backend().native
    if native is None or x.dtype not in TYPES or not x.is_contiguous():
        return plain.square_sum(x)
    total = ctypes.c_double()
    arguments = (native.isa, torch.get_num_threads(), x.numel(), x.data_ptr(), TYPES[x.dtype])
    if native.library.zt_square_sum(*arguments, ctypes.byref(total)):
        raise KernelUnavailable("no memory for the partial sums", where="square_sum", got=f"{x.numel()} elements")
    return torch.tensor(total.value, dtype=torch.float64)


def _shard(native: Native, p: Tensor, g: Tensor) -> tuple[int, int, int, int, int, int]:
    return native.isa, torch.get_num_threads(), p.numel(), p.data_ptr(), g.data_ptr(), TYPES[g.dtype]


def _results(out: Tensor | None, found_inf: Tensor | None) -> tuple[int | None, int, int | None]:
    return (
        None if out is None else out.data_ptr(),
        NONE if out is None else TYPES[out.dtype],
        None if found_inf is None else found_inf.data_ptr(),
    )


def _register() -> torch.library.Library:
    """The library object: its registrations last as long as it lives."""
    library = torch.library.Library("zero_trial", "DEF")
    cpu = {"adam_": adam_, "lion_": lion_, "adagrad_": adagrad_, "sgd_": sgd_, "square_sum": square_sum}
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, getattr(plain, name), "CUDA")
        library.impl(name, cpu[name], "CPU")
        if name != "square_sum":
            torch.library.register_fake(f"zero_trial::{name}", lambda *_: None, lib=library)
    torch.library.register_fake("zero_trial::square_sum", lambda x: x.new_empty((), dtype=torch.float64), lib=library)
    return library


LIBRARY = _register()

# The ops; who takes them from here has them registered.
OPS = torch.ops.zero_trial
