"""``get_accelerator()`` of DeepSpeed: a common interface to the device of this process, so that
scripts need neither ``torch.cuda`` nor ``torch.cpu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from zero_trial.comm import read_rank_env
from zero_trial.util.memory import machine_memory


def _tensor_type(dtype: torch.dtype) -> property:
    """Return a property that creates tensors of ``dtype`` on the accelerator's device."""
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=self._name))


class Accelerator:
    """Methods that are the same for both kinds of device. Memory is in bytes."""

    _name = "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda" or "cuda:<index>", as torch.device accepts it."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def random(self) -> Any:
        return torch.random

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes in which this device can train models."""
        known = [torch.float]
        known += [torch.half] if self.is_fp16_supported() else []
        return known + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on a device of this kind."""
        return tensor.device.type == self._name

    BFloat16Tensor = _tensor_type(torch.bfloat16)
    ByteTensor = _tensor_type(torch.uint8)
    DoubleTensor = _tensor_type(torch.double)
    FloatTensor = _tensor_type(torch.float)
    HalfTensor = _tensor_type(torch.half)
    IntTensor = _tensor_type(torch.int)
    LongTensor = _tensor_type(torch.long)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"zero_trial's stand-in for DeepSpeed: the accelerator has no {name!r}")


class CpuAccelerator(Accelerator):
    """The CPU: one device; memory is this process's resident set; streams are no-ops."""

    def __init__(self) -> None:
        self._peak = 0

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: CPU operations are synchronous, and the C library keeps freed memory."""

    set_device = synchronize = empty_cache = current_stream = default_stream = range_push = range_pop = _nothing
    Stream = Event = None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def current_device(self) -> int:
        """Return this rank's number on its host, as DeepSpeed does on CPUs."""
        return read_rank_env().local_rank

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of ranks on this host, which share the CPU."""
        return read_rank_env().local_world_size

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "gloo"

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def pin_memory(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return ``tensor``: pinning has no benefit on a CPU."""
        return tensor

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set of this process."""
        now = psutil.Process().memory_info().rss
        self._peak = max(self._peak, now)
        return int(now)

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest resident set that this object has measured since the reset."""
        self.memory_allocated()
        return self._peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak = 0
        self.memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        return machine_memory() or int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().available)


class CudaAccelerator(Accelerator):
    """The GPUs that are visible to this process."""

    _name = "cuda"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        return "nccl"

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the driver's free memory."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def is_fp16_supported(self) -> bool:
        return bool(torch.cuda.get_device_capability()[0] >= 7)

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def range_push(self, msg: str, *_: Any) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, *_: Any) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run ``callback`` once CUDA is initialized; immediately if it already is."""
        return torch.cuda._lazy_call(callback)

    def pin_memory(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name) if name in _OF_TORCH_CUDA else super().__getattr__(name)


# Functions with the same name in torch.cuda.
_OF_TORCH_CUDA = frozenset(
    [
        *("set_device", "current_device", "device_count", "synchronize", "manual_seed", "manual_seed_all"),
        *("initial_seed", "Stream", "stream", "current_stream", "default_stream", "Event", "empty_cache"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
        *("reset_peak_memory_stats", "is_available"),
    ]
)


@functools.lru_cache(maxsize=1)
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process: CUDA if torch finds a GPU, else the CPU."""
    return CudaAccelerator() if torch.cuda.is_available() else CpuAccelerator()
