"""The stand-in device of this process: built, registered with torch as ``standin``, and asked.

device.use()          -> Device; torch.device("standin") works from now on
torch.standin         what torch.cuda is for CUDA: streams, events, memory figures
Device.waits          what the host has waited for, and where
Device.copies()       copies between host and device, and whether computation went on beside
Device.peak           high-water mark of its memory, in bytes
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.device.operators import Operators
from tests.support.device.scheduler import Allocation, Scheduler, UnderWay, Use
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library

NAME = "standin"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared")
IDLE_SECONDS = 0.02  # after which a device whose host is blocked elsewhere goes on

_LONG = ctypes.c_int64
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, _LONG, _LONG)
_CALLS = ("record", "block", "query_event", "wait_event", "wait_stream", "use_on_stream")


def build() -> Path:
    """Compile the device, once per machine and version of torch and of its source.

    Raises KernelUnavailable without a compiler.
    """
    compiler, place = cpu_library.find_compiler(os.environ), Path(torch.__file__).parent
    digest = hashlib.sha256(repr((torch.__version__, compiler, FLAGS)).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    path = cpu_library.cache_folder(os.environ) / f"standin-{digest}.so"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".new")
            folders = [f"-I{place / 'include'}", f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}"]
            command = [*compiler, *FLAGS, *folders[:1], str(SOURCE), *folders[1:], "-ltorch_cpu", "-lc10"]
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=180, check=False)
            if done.returncode:
                raise KernelUnavailable(f"the stand-in device does not compile: {done.stderr[:1000]}")
            made.rename(path)
    return path


@cache
def use() -> Device:
    """Register the device with torch, once per process."""
    return Device(ctypes.CDLL(str(build())))


class Device:
    """The device of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.standin_base.restype = ctypes.c_void_p
        for name in ("arena_bytes", "stream", "new_stream", "new_event", "live", "peak"):
            getattr(library, f"standin_{name}").restype = _LONG
        library.standin_set_stream.argtypes = [_LONG]
        library.standin_release.argtypes = [ctypes.c_void_p, _LONG, _LONG]
        library.standin_log.argtypes, library.standin_log.restype = [ctypes.c_void_p, _LONG], _LONG
        self._log = (_LONG * 4096)()
        given = (
            library.standin_unlock,
            library.standin_lock,
            self._changes,
            self._release,
            self._poison,
            library.standin_share,
        )
        self.scheduler = scheduler = Scheduler(*given)
        answers: dict[str, Callable[[int, int], Any]] = {
            "record": scheduler.record,
            "block": scheduler.block,
            "query_event": lambda event, _: scheduler.is_done(event),
            "wait_event": lambda event, _: scheduler.wait_event(event),
            "wait_stream": lambda stream, _: scheduler.wait_stream(stream),
            "use_on_stream": scheduler.use_on_stream,
        }
        self._calls = [_CALL(self._answer(answers[name])) for name in _CALLS]  # torch calls them as long as it runs
        table = (ctypes.c_void_p * len(_CALLS))(*[ctypes.cast(each, ctypes.c_void_p).value for each in self._calls])
        library.standin_open(table)
        atexit.register(library.standin_close)
        self.base: int = library.standin_base()
        self.arena_bytes: int = library.standin_arena_bytes()
        self.generator = torch.Generator()
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module(self))
        self.torch_device = torch.device(NAME, 0)
        self._operators = Operators(self)

    def _answer(self, act: Callable[[int, int], Any]) -> Callable[[int, int], int]:
        def call(first: int, second: int) -> int:
            try:
                return int(act(first, second) or 0)
            except Exception as error:
                self.library.standin_error(str(error).encode())
                return -1

        return call

    # --- what the scheduler asks ------------------------------------------------------------------

    def _changes(self) -> Iterable[tuple[int, int, int, int]]:
        found: list[tuple[int, int, int, int]] = []
        most = count = len(self._log) // 4
        while count == most:
            count = self.library.standin_log(self._log, most)
            values = self._log[: 4 * count]
            found += zip(values[::4], values[1::4], values[2::4], values[3::4], strict=True)
        return found

    def _release(self, memory: Allocation) -> None:
        self.library.standin_release(memory.base, memory.stream, memory.nbytes)

    def _poison(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0xFF, nbytes)

    # --- for operators ----------------------------------------------------------------------------

    def launch(self, name: str, uses: Iterable[Use], run: Callable[[], UnderWay | None], **kind: Any) -> None:
        """Queue on the current stream."""
        self.scheduler.launch(name, self.stream, uses, run, **kind)

    def synchronize_stream(self, what: str = "stream") -> None:
        self.scheduler.wait_stream(self.stream, what)

    def pages_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor of the CPU, which only queued work may touch."""
        return self._operators.pages_of(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Inside, what is drawn comes from the device's generator."""
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        yield
        self.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(outside)

    # --- for tests --------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        return int(self.library.standin_stream())

    @property
    def waits(self) -> list[str]:
        return self.scheduler.waits

    def copies(self) -> list[tuple[str, int, bool]]:
        """Return (direction, bytes, overlapped) of each copy between host and device."""
        return self.scheduler.copies()

    @property
    def live(self) -> int:
        """Return the bytes that are allocated now."""
        return int(self.library.standin_live())

    @property
    def peak(self) -> int:
        """Return the most bytes that were allocated at once since :meth:`reset`."""
        return int(self.library.standin_peak())

    def reset(self) -> None:
        """Begin to count again."""
        self.library.standin_reset_peak()
        self.scheduler.reset()

    def go_on_when_idle(self) -> None:
        """From now on the device goes on by itself where the host is blocked by something else,
        such as another rank."""

        def watch() -> None:
            while True:
                threading.Event().wait(IDLE_SECONDS)
                self.scheduler.go_on(IDLE_SECONDS)

        threading.Thread(target=watch, name="standin-device", daemon=True).start()


def _module(device: Device) -> types.ModuleType:
    """What torch.standin is."""

    class Stream(torch.Stream):
        def __new__(cls, where: Any = None, **given: Any) -> Stream:
            return super().__new__(cls, **(given or {"device": torch.device(NAME, 0)}))

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False) -> Event:
            return super().__new__(cls, torch.device(NAME, 0), enable_timing=enable_timing)

    def stream_numbered(number: int) -> Stream:
        return Stream(stream_id=number, device_index=0, device_type=20)

    @contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        before = device.stream
        if chosen is not None:
            device.library.standin_set_stream(chosen.stream_id)
        try:
            yield
        finally:
            device.library.standin_set_stream(before)

    def set_rng_state(state: torch.Tensor, where: Any = None) -> None:
        device.synchronize_stream("generator")
        device.generator.set_state(state)

    def get_rng_state(where: Any = None) -> torch.Tensor:
        device.synchronize_stream("generator")
        return device.generator.get_state()

    def manual_seed(seed: int) -> None:
        device.synchronize_stream("generator")
        device.generator.manual_seed(seed)

    module = types.ModuleType(f"torch.{NAME}")
    given: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda where=None: stream_numbered(device.stream),
        "default_stream": lambda where=None: stream_numbered(0),
        "synchronize": lambda where=None: device.scheduler.wait_stream(-1, "device"),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda where: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "init": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda where=None: device.live,
        "memory_reserved": lambda where=None: device.live,
        "max_memory_allocated": lambda where=None: device.peak,
        "max_memory_reserved": lambda where=None: device.peak,
        "reset_peak_memory_stats": lambda where=None: device.library.standin_reset_peak(),
        "mem_get_info": lambda where=None: (device.arena_bytes - device.live, device.arena_bytes),
        "get_device_name": lambda where=None: "stand-in device",
        "get_device_properties": lambda where=None: types.SimpleNamespace(total_memory=device.arena_bytes),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in given.items():
        setattr(module, name, value)
    sys.modules[f"torch.{NAME}"] = module
    return module
