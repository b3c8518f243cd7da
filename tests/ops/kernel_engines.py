"""What a test of the kernel's ways to a disk may skip."""

from __future__ import annotations

import errno
from typing import NoReturn

import pytest

from zero_trial.errors import KernelUnavailable

# What a container and a kernel without it say. The rest would be a fault of csrc/cpu/disk.cpp.
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def skip_where_refused(name: str, fault: OSError | KernelUnavailable) -> NoReturn:
    """Skip where this machine has no library or does not permit the way; else raise the fault."""
    if isinstance(fault, OSError) and fault.errno not in REFUSALS:
        raise fault
    pytest.skip(f"{name}: {fault}")
