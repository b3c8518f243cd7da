"""torch's profiler around a run: entered once, stepped once per optimizer step."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch


class Profiling:
    """Nothing until ``set`` is called; then a torch.profiler.profile whose traces go to the TensorBoard folder."""

    def __init__(self) -> None:
        self._profile: Any = None

    def set(self, path: Path, *args: Any, **options: Any) -> None:
        """``args`` and ``options`` are those of torch.profiler.profile."""
        options.setdefault("on_trace_ready", torch.profiler.tensorboard_trace_handler(str(path)))
        self._profile = torch.profiler.profile(*args, **options)

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def __enter__(self) -> Profiling:
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._profile.__exit__(kind, error, trace)
