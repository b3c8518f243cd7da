"""An optimizer step of one CUDA tensor: one launch that needs no table, or plain torch where no kernel takes the tensors."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from zero_trial.ops import cuda_backend, cuda_kernels, cuda_scalars, many, overlap, plain
from zero_trial.ops.cuda_arguments import CODES, no_graph, numbered, one_float, padded, pointer
from zero_trial.ops.cuda_kernels import NONE
from zero_trial.ops.cuda_tables import tiles_of

_ARGUMENTS = struct.Struct("4P2q5P3q")  # ZtUpdate of csrc/cuda/update.cu, up to the op


def arguments_of(
    flags: tuple[int, int], pointers: tuple[int, int, int, int, int], n: int, tiles: int, scalars: bytes
) -> bytes:
    """A launch that holds its one piece. ``flags``: found_inf, factor; ``pointers``: p, g, two states, out; null for none."""
    return padded(_ARGUMENTS.pack(0, 0, *flags, 1, tiles, *pointers, n, 0, 0) + scalars)


def _step(
    op: str, p: Tensor, g: Tensor, a: Tensor, b: Tensor | None, out: Tensor | None, found: Tensor | None, scalars: bytes
) -> bool:
    """Steps one tensor; False where plain torch must. Written for few microseconds."""
    if p.requires_grad:
        no_graph(p)
    n, where, cuda = p.numel(), p.device, cuda_backend.cuda_backend().cuda
    takes = p.dtype is torch.float32 and p.is_contiguous()
    for x, may_be_low in ((g, True), (a, False), (b, False), (out, True)):
        if x is not None:
            if x.numel() != n:
                many.same_sizes([p], [x])
            sound = x.dtype in CODES if may_be_low else x.dtype is torch.float32
            takes = takes and sound and x.device == where and x.is_contiguous()
    if not n:
        return True
    if cuda is None or not takes or not (found is None or one_float(found, where)):
        return False
    stored, copied = CODES[g.dtype], NONE if out is None else CODES[out.dtype]
    kernel = cuda_kernels.update(op, stored, copied)
    if not cuda.has(kernel, where):
        return False
    pointers = (p.data_ptr(), g.data_ptr(), a.data_ptr(), pointer(b), pointer(out))
    overlap.check_step(pointers, n, stored, copied)
    tiles, flag = tiles_of(n), 0 if found is None else found.data_ptr()
    cuda.fill(kernel, where, tiles, arguments_of((flag, 0), pointers, n, tiles, scalars))
    return True


def adam_(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: float, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1."""
    numbered(step)
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    if not _step("ZtAdam", p, g, m, v, out, found_inf, cuda_scalars.adam(*numbers, multiplier, decoupled)):
        plain.adam_(p, g, m, v, out, found_inf, *numbers, multiplier, decoupled)


def lion_(
    p: Tensor, g: Tensor, m: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Lion."""
    numbers = (lr, beta1, beta2, weight_decay, multiplier)
    if not _step("ZtLion", p, g, m, None, out, found_inf, cuda_scalars.lion(*numbers)):
        plain.lion_(p, g, m, out, found_inf, *numbers)


def adagrad_(
    p: Tensor, g: Tensor, s: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, eps: float,
    weight_decay: float, multiplier: float,
) -> None:  # fmt: skip
    """Adagrad; ``lr`` with its decay already in it."""
    numbers = (lr, eps, weight_decay, multiplier)
    if not _step("ZtAdagrad", p, g, s, None, out, found_inf, cuda_scalars.adagrad(*numbers)):
        plain.adagrad_(p, g, s, out, found_inf, *numbers)


def sgd_(
    p: Tensor, g: Tensor, b: Tensor, out: Tensor | None, found_inf: Tensor | None, lr: float, momentum: float,
    dampening: float, weight_decay: float, first: bool, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    numbers = (lr, momentum, dampening, weight_decay, first, nesterov, multiplier)
    if not _step("ZtSgd", p, g, b, None, out, found_inf, cuda_scalars.sgd(*numbers)):
        plain.sgd_(p, g, b, out, found_inf, *numbers)
