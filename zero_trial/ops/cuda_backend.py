"""Which CUDA kernels this process can run, and why not where it cannot: compiled by NVRTC at first use, cached, launched by the driver.

``ZERO_TRIAL_OPS`` chooses as it does on CPU: ``auto``, ``reference`` or ``native``. A kernel that cannot be had is said once and
stays plain torch for the rest of the process; with ``native`` it is an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import _library_cache, _nvrtc, cuda_kernels
from zero_trial.ops._native import VARIABLE, backend
from zero_trial.ops._nvrtc_cache import KernelCache
from zero_trial.ops.cuda_driver import open_driver
from zero_trial.ops.cuda_kernels import Kernel
from zero_trial.ops.cuda_runtime import Cuda, Device

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class CudaBackend:
    """What runs the ops on CUDA: ``cuda``, or plain torch because of ``why``."""

    cuda: Cuda | None
    why: str = ""

    def describe(self) -> str:
        if self.cuda is None:
            return f"plain torch ({self.why})"
        refused = f"; plain torch for {len(self.cuda.refused)} kernels" if self.cuda.refused else ""
        return self.cuda.description + refused


@cache
def cuda_backend() -> CudaBackend:
    """What this process runs on CUDA: chosen at the first call; kernels are compiled when they are first needed."""
    return choose(os.environ, torch.version.cuda is not None and torch.cuda.is_available())


def native_on(device: torch.device) -> bool:
    """Whether kernels of ours run on this kind of device in this process."""
    if device.type == "cpu":
        return backend().native is not None
    return device.type == "cuda" and cuda_backend().cuda is not None


def choose(environ: Mapping[str, str], device_present: bool) -> CudaBackend:
    """Raises KernelUnavailable where there is a device, ``native`` is asked for, and it cannot be had."""
    wanted = environ.get(VARIABLE) or "auto"
    if wanted == "reference":
        return CudaBackend(None, f"{VARIABLE}=reference")
    if not device_present:
        return CudaBackend(None, "no CUDA device")
    try:
        return CudaBackend(open_cuda(environ, strict=wanted == "native"))
    except KernelUnavailable as trouble:
        if wanted == "native":
            raise KernelUnavailable(
                "the CUDA kernels cannot be used",
                where=f"{VARIABLE}=native",
                got=trouble.what,
                fix=trouble.fix or "Mend this, or set it to auto.",
            ) from trouble
        log.warning("CUDA kernels run as plain torch: %s", trouble.what)
        return CudaBackend(None, trouble.what)


def open_cuda(environ: Mapping[str, str], *, strict: bool) -> Cuda:
    """The driver and NVRTC of this machine. Raises KernelUnavailable."""
    driver, nvrtc, kept = open_driver(), _nvrtc.open_nvrtc(majors=majors()), kernel_cache(environ)
    version = f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"
    return Cuda(
        driver,
        partial(images, nvrtc, kept),
        device_of,
        stream_of(),
        strict,
        f"native ({version}, kept in {kept.folder or 'memory'})",
    )


def majors() -> list[int]:
    """CUDA's major versions, torch's own first: its compiler makes what the driver that runs torch takes."""
    own = int((torch.version.cuda or "0").split(".")[0])
    return sorted(_nvrtc.MAJORS, key=lambda major: major != own)


def kernel_cache(environ: Mapping[str, str]) -> KernelCache:
    """Where compiled kernels are kept between processes; in memory where there is no home, or others could have put kernels there."""
    try:
        folder = _library_cache.cache_folder(environ)
        trouble = _library_cache.open_to_others(folder)
    except FileNotFoundError:
        trouble = ""
    except (RuntimeError, OSError):
        return KernelCache(None)
    if trouble:
        log.warning("CUDA kernels are compiled anew in every process, as they cannot be kept: %s", trouble)
    return KernelCache(None if trouble else folder)


def images(nvrtc: _nvrtc.Nvrtc, kept: KernelCache, kernel: Kernel, arch: int) -> Iterator[bytes]:
    """Machine code for that architecture, then PTX, each made when it is asked for. Raises KernelUnavailable."""
    target = nvrtc.target(arch)
    yield compiled(kernel, nvrtc, target, kept)
    if not target.ptx:
        yield compiled(kernel, nvrtc, _nvrtc.Target(target.arch, ptx=True), kept)


def compiled(kernel: Kernel, nvrtc: _nvrtc.Nvrtc, target: _nvrtc.Target, kept: KernelCache) -> bytes:
    """Machine code or PTX of a kernel, from the cache or the compiler. Raises KernelUnavailable."""
    key = cuda_kernels.key(kernel, f"NVRTC {nvrtc.version}", target.option)
    return kept.get(
        key,
        lambda: nvrtc.compile(
            kernel.source, cuda_kernels.source_of(kernel), cuda_kernels.headers(), kernel.options, target
        ),
    )


@cache
def device_of(where: torch.device) -> Device:
    """Facts of a CUDA device; one without a number is the current one and must not be asked for."""
    if where.index is None:
        raise KernelUnavailable("a CUDA device without a number", got=str(where), expected="cuda:0, cuda:1 ...")
    properties = torch.cuda.get_device_properties(where)
    return Device(where.index, 10 * properties.major + properties.minor, properties.multi_processor_count)


def stream_of() -> Callable[[torch.device], int]:
    """Reads the handle of a device's current stream; torch's short cut saves an object and its checks at every launch."""
    short_cut = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if short_cut is None:
        return lambda where: int(torch.cuda.current_stream(where).cuda_stream)
    return lambda where: int(short_cut(where.index))
