"""The CUDA kernels by name: which source, compiled with which definitions, and what makes its machine code another one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zero_trial.ops._build import SOURCES

# The same bits as on CPU: nothing contracted, IEEE division and root, subnormal numbers kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
ARCHS = (80, 90, 100)  # A100, H100 and H200, B200: compiled in the tests
NONE, FP32, BF16, FP16 = -1, 0, 1, 2  # how floats are stored: ZT_GRADIENT, ZT_OUT ...
STORED = (FP32, BF16, FP16)
# As many as registers allow without spilling; two of them keep enough loads under way already.
_BLOCKS = {"ZtAdam": 4, "ZtLion": 4, "ZtAdagrad": 3, "ZtSgd": 4, "copy": 5} | {
    "zt_lamb_moments": 2,
    "zt_lamb_squares": 4,
    "zt_lamb_apply": 3,
}


@dataclass(frozen=True, eq=False)
class Kernel:
    """One ``extern "C"`` function of a source below csrc/cuda. ``definitions`` are its macros: what it is compiled for.

    ``blocks``: how many of them a multiprocessor holds at once, which bounds registers and is what a grid asks for.
    Made by the functions below only, each once, so that a kernel is known by its identity: looking it up costs next to nothing.
    """

    source: str
    entry: str
    definitions: tuple[tuple[str, str | int], ...] = ()
    blocks: int = 4

    @property
    def options(self) -> tuple[str, ...]:
        return (*OPTIONS, f"-DZT_BLOCKS={self.blocks}", *(f"-D{name}={value}" for name, value in self.definitions))

    @property
    def name(self) -> str:
        given = ",".join(f"{name.removeprefix('ZT_').lower()}={value}" for name, value in self.definitions)
        return f"{self.entry}({given})"


@cache
def update(op: str, gradient: int, out: int) -> Kernel:
    """One optimizer step; ``op`` is a struct of zt_optimizers.h."""
    return Kernel("update.cu", "zt_update", (("ZT_OP", op), ("ZT_GRADIENT", gradient), ("ZT_OUT", out)), _BLOCKS[op])


@cache
def copy(source: int, into: int, add: bool) -> Kernel:
    """Flat buffers copied into others, or added to them."""
    return Kernel("copy.cu", "zt_copy", (("ZT_FROM", source), ("ZT_INTO", into), ("ZT_ADD", int(add))), _BLOCKS["copy"])


@cache
def square_sum(stored: int) -> Kernel:
    """Sums of squares of chunks."""
    return Kernel("square_sum.cu", "zt_square_sum", (("ZT_TYPE", stored),))


@cache
def sums() -> Kernel:
    """Sums of sums."""
    return Kernel("square_sum.cu", "zt_sum", (("ZT_TYPE", FP32),))


@cache
def step_control() -> Kernel:
    """Norm, factor and skip from the sum of squares."""
    return Kernel("step_control.cu", "zt_step_control")


@cache
def lamb(entry: str, gradient: int, out: int) -> Kernel:
    """One pass of LAMB: an entry of ``LAMB_PASSES``."""
    number = 1 + LAMB_PASSES.index(entry)
    definitions = (("ZT_PASS", number), ("ZT_GRADIENT", gradient), ("ZT_OUT", out))
    return Kernel("lamb.cu", entry, definitions, _BLOCKS[entry])


LAMB_PASSES = ("zt_lamb_moments", "zt_lamb_squares", "zt_lamb_apply")
OPTIMIZERS = ("ZtAdam", "ZtLion", "ZtAdagrad", "ZtSgd")


def every_kernel() -> list[Kernel]:
    """All that the ops can ask for."""
    outs = (NONE, *STORED)
    return [
        *(update(op, gradient, out) for op in OPTIMIZERS for gradient in STORED for out in outs),
        *(lamb("zt_lamb_moments", gradient, NONE) for gradient in STORED),
        *(lamb("zt_lamb_apply", FP32, out) for out in outs),
        lamb("zt_lamb_squares", FP32, NONE),
        *(square_sum(stored) for stored in STORED),
        *(sums(), step_control()),
        *(copy(source, into, add) for source in STORED for into in STORED for add in (False, True)),
    ]


def source_of(kernel: Kernel) -> str:
    """The text of its file."""
    return _read(SOURCES / "cuda" / kernel.source)


def headers() -> dict[str, str]:
    """All headers, by the name that sources include them by."""
    return {path.name: _read(path) for path in sorted((SOURCES / "include").glob("*.h"))}


def key(kernel: Kernel, compiler: str, target: str) -> str:
    """Names the machine code: sources, options, compiler and target."""
    digest = hashlib.sha256(repr((kernel.options, compiler, target, source_of(kernel))).encode())
    for name, text in headers().items():
        digest.update(name.encode() + text.encode())
    return digest.hexdigest()[:24]


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
