"""GPUs that are not there: tensors that say they are on one, and what torch would tell of it, over
the emulated driver.

Everything between ``torch.ops.zero_trial`` and the driver's functions runs as on a machine with
GPUs: the choice of kernels, NVRTC, its cache, contexts, streams, tables, launch arguments, and the
kernels' own arithmetic. Of torch, ``torch.cuda``'s questions and the ``device`` of tensors
are pretended; their memory is this machine's, and a kernel may touch that of its own GPU only.
"""

from __future__ import annotations

import ctypes
import re
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.emulated_cuda import Bindings, Emulator, MeasuredDriver
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cpu_library import Backend, KernelCache
from zero_trial.ops.cuda_runtime import CudaRuntime, Kernel, Nvrtc
from zero_trial.ops.dispatch import CUDA

# of the host for the device
WAITS = {"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"}


class OnGpu(Tensor):
    """Memory of this machine that says it is of a GPU's: of number ``index``."""

    index = -1

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


KINDS = tuple(type(f"OnGpu{index}", (OnGpu,), {"index": index}) for index in range(4))


@dataclass
class Gpus(TorchFunctionMode):
    """``streams``: the current one of each GPU, 0 for the null stream. ``waits``: what the host
    would have waited for."""

    emulator: Emulator
    archs: Sequence[int]
    streams: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    room_made: int = 0
    capturing: bool = False
    _kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)
        library = self.emulator.library
        library.reset(len(self.archs), (ctypes.c_int * len(self.archs))(*self.archs))
        library.forget()
        self.streams = [library.new_stream(index) for index in range(len(self.archs))]

    def put(self, index: int, x: Tensor, *, writable: bool = True) -> Tensor:
        """A tensor of the same storage, on that GPU: views of one buffer stay views of one
        buffer."""
        with torch._C.DisableTorchFunction():
            storage = x.untyped_storage()
            begin, length = storage.data_ptr(), storage.nbytes()
            if length and (begin, length) not in self._kept:
                self.emulator.library.allow_on(begin, begin + length, int(writable), index)
                # no other tensor gets this memory, for it may be another GPU's
                self._kept[begin, length] = x
            return x.as_subclass(KINDS[index])

    def back(self, x: Tensor) -> Tensor:
        """The same memory as a tensor of the CPU; no wait."""
        with torch._C.DisableTorchFunction():
            return x.as_subclass(Tensor)

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        packet = str(getattr(func, "_qualified_op_name", ""))
        gpus = [x.index for x in flat(args) if isinstance(x, OnGpu)]
        if gpus and packet.startswith("zero_trial::"):
            with self:  # what the dispatcher does with CUDA tensors
                return CUDA[packet.partition("::")[2]](*args, **given)
        if name == "pin_memory":
            return pinned(args[0])
        to = given.get("device", next((x for x in args[1:] if isinstance(x, torch.device)), None))
        if isinstance(to, torch.device) and to.type == "cuda":
            if name == "to":
                if not (given.get("non_blocking") and getattr(args[0], "pinned", False)) and not gpus:
                    self.waits.append("a copy from memory that is not pinned")
                return self.put(to.index, self.back(args[0]).clone())
            made = func(*args, **{**given, "device": torch.device("cpu")})
            return self.put(to.index, made)
        if gpus and (name in WAITS or (name == "to" and isinstance(to, torch.device))):
            self.waits.append(name)
            return func(*[self.back(x) if isinstance(x, Tensor) else x for x in args], **given)
        result = func(*args, **given)
        for each in flat(result):
            if isinstance(each, OnGpu):
                self.put(each.index, self.back(each))
        return result

    def properties(self, where: torch.device) -> Any:
        arch = self.archs[where.index]
        return types.SimpleNamespace(
            major=arch // 10, minor=arch % 10, multi_processor_count=self.emulator.multiprocessors
        )

    def make_room(self) -> None:
        self.room_made += 1


def pinned(x: Tensor) -> Tensor:
    copy = x.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def flat(given: Any) -> list[Any]:
    """Lists and tuples opened."""
    if isinstance(given, list | tuple):
        return [x for each in given for x in flat(each)]
    return [given]


class Stream:
    """A stream of torch's, of one GPU; what is given to any of them is done at once."""

    gpus: Gpus

    def __init__(self, device: torch.device, handle: int | None = None) -> None:
        self.index = device.index
        self.cuda_stream = self.gpus.emulator.library.new_stream(device.index) if handle is None else handle

    def wait_stream(self, other: Stream) -> None:
        """Nothing is still under way."""

    def synchronize(self) -> None:
        """Nothing is still under way."""


def install_torch(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of these GPUs."""
    kind = type("StreamOfThese", (Stream,), {"gpus": gpus})

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, gpus.streams[one.index] = gpus.streams[one.index], one.cuda_stream
        yield
        gpus.streams[one.index] = before

    given: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_properties": gpus.properties,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": gpus.make_room,
        "mem_get_info": lambda *_: (1 << 30, 1 << 31),
        "Stream": kind,
        "current_stream": lambda at: kind(at, gpus.streams[at.index]),
        "default_stream": lambda at: kind(at, 0),
        "stream": stream,
        "is_current_stream_capturing": lambda: gpus.capturing,
        "Event": Event,
    }
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


class Event:
    """A moment on a device's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is still under way."""

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def as_compiled_by_both(ptx: str, kernel: Kernel, emulator: Emulator) -> None:
    """NVRTC and g++ give the launch's arguments the same size, and the same number of threads."""
    declared = re.search(rf"\.entry {kernel.entry}\((.*?)\)(.*?)\{{", ptx, re.DOTALL)
    assert declared is not None, f"{kernel.name}: no such entry"
    parameters = re.findall(r"\.param \.align (\d+) \.b8 \w+\[(\d+)\]", declared[1])
    made = ctypes.CDLL(str(emulator.built[kernel]))
    assert parameters == [("8", str(made.arguments_size()))], (kernel.name, parameters)
    bounds = re.findall(r"\.maxntid (\d+)", declared[2])
    assert bounds in ([], [str(made.threads())]), (kernel.name, bounds)


def install(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> Backend[CudaRuntime]:
    """This process has these GPUs. What is compiled is emulated by g++'s code of the same
    kernel."""
    emulator, compiled = gpus.emulator, cuda_runtime.compiled

    def watched(nvrtc: Nvrtc, kept: KernelCache, kernel: Kernel, arch: int) -> bytes:
        image, target = compiled(nvrtc, kept, kernel, arch), nvrtc.target(arch)
        emulator.build([kernel])
        if target.ptx:
            as_compiled_by_both(image.decode(), kernel, emulator)
        emulator.library.compiled(image, len(image), str(emulator.built[kernel]).encode(), target.arch, int(target.ptx))
        return image

    monkeypatch.setattr(cuda_runtime, "compiled", watched)
    monkeypatch.setattr(cuda_runtime, "open_driver", lambda: MeasuredDriver(Bindings(emulator.library)))
    install_torch(gpus, monkeypatch)
    cuda_runtime.device_of.cache_clear()
    chosen = cuda_runtime.choose(environ, "CUDA", cuda_runtime.open_cuda)
    if chosen.native is not None:
        chosen.native.make_room = gpus.make_room
    monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda: chosen)
    return chosen
