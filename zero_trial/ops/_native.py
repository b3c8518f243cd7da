"""The loaded CPU library, typed; which of its copies this processor runs; and why there is none where there is none.

``ZERO_TRIAL_OPS`` chooses: ``auto`` (native where it can be had, else plain torch, said once), ``reference`` (plain torch) or
``native`` (an error where it cannot be had).
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import _build

VARIABLE = "ZERO_TRIAL_OPS"
CHOICES = ("auto", "reference", "native")
ISAS = ("baseline", "avx2", "avx512")

NONE = -1
TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

log = logging.getLogger("zero_trial")

_INT, _LONG, _POINTER, _DOUBLE = ctypes.c_int, ctypes.c_long, ctypes.c_void_p, ctypes.c_double
_STEPS = ("zt_adam", "zt_lion", "zt_adagrad", "zt_sgd")

# ``struct ZtCall`` of csrc/cpu/call.h: isa, threads, n, p, g, type of g, two states, out, its type, found_inf;
# lr, beta1, beta2, eps, weight_decay, multiplier and two numbers that only one kernel has; two flags. Packing one block and
# passing one pointer takes a third of the time of passing twenty arguments through ctypes.
CALL = struct.Struct("=11q8d2q")


@dataclass(frozen=True)
class Native:
    """The functions of the library, and the number of the copy to run (an index of ISAS)."""

    library: ctypes.CDLL
    isa: int


@dataclass
class Backend:
    """What runs the ops on CPU: ``native``, or plain torch because of ``why``. ``strict``: native was asked for, nothing else will do."""

    native: Native | None
    why: str = ""
    strict: bool = False

    def withdraw(self, why: str) -> None:
        """From now on plain torch: another rank has no kernels, and ranks must compute alike."""
        self.native, self.why = None, why

    def describe(self) -> str:
        if self.native is None:
            return f"plain torch ({self.why})"
        return f"native ({ISAS[self.native.isa]}, {torch.get_num_threads()} threads)"


@cache
def backend() -> Backend:
    """What this process runs on CPU: chosen, and where necessary built, at the first call."""
    return choose(os.environ)


def choose(environ: Mapping[str, str]) -> Backend:
    """Raises ConfigError for an unknown choice and KernelUnavailable where ``native`` is asked for and cannot be had."""
    wanted = environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise ConfigError("no such choice of kernels", where=VARIABLE, got=repr(wanted), expected=", ".join(CHOICES))
    if wanted == "reference":
        return Backend(None, f"{VARIABLE}=reference")
    try:
        return Backend(open_native(environ), strict=wanted == "native")
    except KernelUnavailable as trouble:
        if wanted == "native":
            raise KernelUnavailable(
                "the native kernels cannot be used",
                where=f"{VARIABLE}=native",
                got=trouble.what,
                fix="Mend this, or set it to auto.",
            ) from trouble
        log.warning("CPU kernels run as plain torch, about as fast as torch's own foreach: %s", trouble.what)
        return Backend(None, trouble.what)


def open_native(environ: Mapping[str, str]) -> Native:
    """Loads the library and types its functions. Raises KernelUnavailable."""
    return typed(_build.load(environ))


def typed(library: ctypes.CDLL) -> Native:
    """The library with its functions' types. Raises KernelUnavailable where one is missing."""
    try:
        for name in _STEPS:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_char_p], None
        library.zt_square_sum.argtypes = [_INT, _INT, _LONG, _POINTER, _INT, ctypes.POINTER(_DOUBLE)]
        library.zt_square_sum.restype = _INT
        library.zt_add.argtypes, library.zt_add.restype = [_INT, _INT, _LONG, _POINTER, _INT, _POINTER, _INT], None
        library.zt_sum.argtypes = [_INT, _INT, _LONG, _INT, ctypes.c_char_p, _INT, _POINTER]
        library.zt_sum.restype = None
        library.zt_lamb_moments.argtypes, library.zt_lamb_moments.restype = [ctypes.c_char_p, _LONG, _POINTER], _INT
        library.zt_lamb_apply.argtypes, library.zt_lamb_apply.restype = [ctypes.c_char_p, _LONG], None
        library.zt_best_isa.argtypes, library.zt_best_isa.restype = [], _INT
    except AttributeError as missing:
        raise KernelUnavailable(f"the library of kernels is not whole: {missing}") from None
    return Native(library, library.zt_best_isa())
