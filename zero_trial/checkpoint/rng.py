"""The state of this process's random generators, taken and put back: torch (CPU and one CUDA device), numpy, random."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from zero_trial.errors import CheckpointError


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Plain values and tensors, for ``tree.encode``. ``device``: the CUDA device of this rank, if any.

    numpy's global generator is included if numpy is loaded: otherwise nobody has drawn from it.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, position, has_gauss, cached = numpy.random.get_state()
        key = torch.tensor([int(word) for word in words], dtype=torch.int64)
        state["numpy"] = {"kind": str(kind), "words": key, "rest": [int(position), int(has_gauss), float(cached)]}
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> list[str]:
    """Put back what ``capture_rng`` took; the names of generators that this process does not have are returned.

    Raises CheckpointError for a state that is not one.
    """
    left_out = []
    try:
        torch.set_rng_state(state["torch"].cpu())
        python = state["random"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        if "cuda" in state:
            if device is not None and device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"].cpu(), device)
            else:
                left_out.append("cuda")
        if "numpy" in state and not _restore_numpy(state["numpy"]):
            left_out.append("numpy")
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as fault:
        raise CheckpointError(
            "not a state of random generators", where="rng", got=f"{type(fault).__name__}: {fault}"
        ) from fault
    return left_out


def _restore_numpy(state: Mapping[str, Any]) -> bool:
    try:
        import numpy
    except ImportError:
        return False
    position, has_gauss, cached = state["rest"]
    words = numpy.array(state["words"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state((state["kind"], words, position, has_gauss, cached))
    return True
