"""``get_accelerator()`` of DeepSpeed: the device of this process behind one set of methods, so that
a script names neither ``torch.cuda`` nor ``torch.cpu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from zero_trial.comm import rank_and_size, read_rank_env
from zero_trial.errors import ConfigError
from zero_trial.util.memory import machine_memory


def _tensor_type(dtype: torch.dtype) -> property:
    """Return an attribute that makes tensors of ``dtype`` on the accelerator's device."""
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=self._name))


class Accelerator:
    """What both kinds of device answer alike. Memory is in bytes."""

    _name = "cpu"
    _compile_backend = "inductor"

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda" or "cuda:<index>", as torch.device takes it."""
        return self._name

    def random(self) -> Any:
        return torch.random

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes that models can be trained in here."""
        known = [torch.float]
        known += [torch.half] if self.is_fp16_supported() else []
        return known + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def is_bf16_supported(self) -> bool:
        raise NotImplementedError

    def is_fp16_supported(self) -> bool:
        raise NotImplementedError

    def is_fp64_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Say whether ``tensor`` is on a device of this kind."""
        return tensor.device.type == self._name

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Remember the backend for torch.compile; raises ConfigError for one that torch lacks."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(
                "torch has no such backend", where="set_compile_backend", got=backend, expected=", ".join(known)
            )
        self._compile_backend = backend

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that hide devices from a process."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write the chosen devices into ``current_env``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Return the prefixes of variables that a launcher passes on to other hosts."""
        return []

    BFloat16Tensor = _tensor_type(torch.bfloat16)
    ByteTensor = _tensor_type(torch.uint8)
    DoubleTensor = _tensor_type(torch.double)
    FloatTensor = _tensor_type(torch.float)
    HalfTensor = _tensor_type(torch.half)
    IntTensor = _tensor_type(torch.int)
    LongTensor = _tensor_type(torch.long)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("op_builder") or name in ("op_builder_dir", "build_extension"):
            raise AttributeError(
                f"get_accelerator().{name} is refused by zero_trial's stand-in: its kernels are built by "
                "the first process that needs them, and there are no op builders"
            )
        raise AttributeError(f"zero_trial's stand-in for DeepSpeed: the accelerator has no {name!r}")


class CpuAccelerator(Accelerator):
    """The processor: one device, memory is this process's resident set, streams do nothing."""

    def __init__(self) -> None:
        self._peak = 0

    def is_synchronized_device(self) -> bool:
        return True

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one."""

    def current_device(self) -> int:
        """Return this rank's number on its host, as DeepSpeed does on processors."""
        return read_rank_env().local_rank

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of ranks on this host: ranks share the processor."""
        return read_rank_env().local_world_size

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: operations have ended when they return."""

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

    Stream = None
    Event = None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    default_stream = current_stream

    def empty_cache(self) -> None:
        """Do nothing: the C library keeps freed memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set of this process."""
        now = psutil.Process().memory_info().rss
        self._peak = max(self._peak, now)
        return int(now)

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest resident set that a call of this object has seen since the reset."""
        self.memory_allocated()
        return self._peak

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak = 0
        self.memory_allocated()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        return machine_memory() or int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().available)

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Do nothing: profilers of processors do not show ranges."""

    def range_pop(self, domain: str | None = None) -> None:
        """Do nothing."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_current_stream_capturing(self) -> bool:
        return False

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Do nothing: there are no graphs of a processor's work."""

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return ``tensor``: no device reads it from elsewhere."""
        return tensor


class CudaAccelerator(Accelerator):
    """The GPUs that this process sees."""

    _name = "cuda"

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        return "nccl"

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Return what the driver has free."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def is_fp16_supported(self) -> bool:
        return bool(torch.cuda.get_device_capability()[0] >= 7)

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_triton_supported(self) -> bool:
        return bool(torch.cuda.get_device_capability()[0] >= 8)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run ``callback`` once CUDA is initialized, at once if it is."""
        return torch.cuda._lazy_call(callback)

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return tensor.pin_memory()

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name) if name in _OF_TORCH_CUDA else super().__getattr__(name)


# What torch.cuda calls the same.
_OF_TORCH_CUDA = frozenset(
    [
        *("set_device", "current_device", "device_count", "synchronize", "manual_seed", "manual_seed_all"),
        *("initial_seed", "Stream", "stream", "current_stream", "default_stream", "Event", "empty_cache"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
        *("reset_peak_memory_stats", "is_available", "is_current_stream_capturing"),
    ]
)


@functools.lru_cache(maxsize=1)
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process: CUDA where torch finds a GPU, else the processor."""
    return CudaAccelerator() if torch.cuda.is_available() else CpuAccelerator()


def is_current_accelerator_supported() -> bool:
    """Return True: both kinds are."""
    return True


def say_memory(message: str) -> str:
    """Return a line on the memory of the device and the host, in GiB, for rank 0's output."""
    accelerator = get_accelerator()
    gib = 1024**3
    host = psutil.virtual_memory()
    return (
        f"{message}: rank {rank_and_size()[0]} on {accelerator.current_device_name()}: "
        f"allocated {accelerator.memory_allocated() / gib:.2f} GiB (max {accelerator.max_memory_allocated() / gib:.2f}), "
        f"reserved {accelerator.memory_reserved() / gib:.2f} GiB (max {accelerator.max_memory_reserved() / gib:.2f}), "
        f"host {(host.total - host.available) / gib:.2f} GiB used ({host.percent} %)\n"
    )
