"""The ops on CUDA tensors, by the names that the library registers: a few launches of kernels of csrc/cuda, or plain torch.

Everything a step depends on is read from device memory by the kernel, so nothing here waits for the device: ``found_inf``, ``factor``
and, in a launch over many tensors, the table of pointers and scalars, which is copied there in the order of the stream.

    launches    adam_, lion_, adagrad_, sgd_ 1 · the same over many tensors 1 (per pair of gradient's and copy's dtype; one alone needs no table) ·
                square_sum 1 + 1 per factor 1024 of chunks · LAMB 2 and 1

A CUDA graph cannot hold a table: while one is captured each tensor is a launch of its own, and casts and LAMB are plain torch.
"""

from __future__ import annotations

from zero_trial.ops.cuda_buffers import add_many_, copy_many_, square_sum, step_control_
from zero_trial.ops.cuda_lamb import lamb_apply_, lamb_moments_
from zero_trial.ops.cuda_many import adagrad_many_, adam_many_, lion_many_, sgd_many_
from zero_trial.ops.cuda_one import adagrad_, adam_, lion_, sgd_

__all__ = [
    "adagrad_",
    "adagrad_many_",
    "adam_",
    "adam_many_",
    "add_many_",
    "copy_many_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "lion_many_",
    "sgd_",
    "sgd_many_",
    "square_sum",
    "step_control_",
]
