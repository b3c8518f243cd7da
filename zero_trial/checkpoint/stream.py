"""A checkpoint's tensors read in order, a chunk at a time: no tensor is ever whole in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from zero_trial.checkpoint.dtypes import dtype_of
from zero_trial.checkpoint.reader import CheckpointReader

OPEN_FILES = 64  # at once; a checkpoint of many ranks has as many files


class TensorStream:
    """A context manager that keeps the files open which were read last."""

    def __init__(self, reader: CheckpointReader, chunk_bytes: int = 1 << 24) -> None:
        self._reader = reader
        self._chunk_bytes = chunk_bytes
        self._open: OrderedDict[str, tuple[ExitStack, Any]] = OrderedDict()

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1][0].close()

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """The elements of ``name`` from first to last, in new 1-D tensors of its dtype and at most ``chunk_bytes``. Raises CheckpointError."""
        entry = self._reader.manifest.tensors[name]
        step = max(1, self._chunk_bytes // dtype_of(entry.dtype).itemsize)
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            count = piece.stop - piece.start
            for start in range(0, count, step):
                yield self._read(piece.file, piece.key, start, min(start + step, count))

    def _read(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        if file not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)[1][0].close()
            stack = ExitStack()
            self._open[file] = stack, stack.enter_context(self._reader.open_file(file))
        self._open.move_to_end(file)
        return self._reader.read_range(self._open[file][1], key, start, stop, file)
