"""The time in which everything that lies in a file can be seen and edited, in pages of a mapping; nested openings share the outermost one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from zero_trial.errors import StorageError
from zero_trial.zero.spill_trouble import Trouble


class Opening:
    """``mapped()`` gives the file's bytes, or None where there is no file. ``before()`` waits for all transfers, ``open_(area)`` and
    ``shut(area)`` put tensors over the area and take them away again."""

    def __init__(
        self,
        mapped: Callable[[], AbstractContextManager[torch.Tensor | None]],
        trouble: Trouble,
        before: Callable[[], None],
        open_: Callable[[torch.Tensor | None], None],
        shut: Callable[[torch.Tensor | None], None],
    ) -> None:
        self._mapped = mapped
        self._trouble = trouble
        self._before = before
        self._open = open_
        self._shut = shut
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Raises StorageError, also if the disk has failed before."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            edited = False
            try:
                self._trouble.require_none()
                self._before()
                with self._mapped() as area:
                    self._open(area)
                    try:
                        yield
                    finally:
                        self._shut(area)
                        edited = True
            except StorageError as fault:
                if edited:  # what was edited may not have reached the disk
                    self._trouble.remember(fault)
                raise
        finally:
            self._depth -= 1
