"""Which elements to copy from where to where: wanted ranges of logical tensors cut with the pieces of a manifest.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zero_trial.checkpoint.manifest import TensorEntry
from zero_trial.errors import CheckpointError


class Want(NamedTuple):
    """Elements [start, stop) of ``name`` are wanted; ``target`` is the caller's number for where they go."""

    name: str
    start: int
    stop: int
    target: int


class Copy(NamedTuple):
    """Elements [source_start, source_stop) of entry ``key`` in ``file`` go to ``target``, from element ``offset``
    on."""

    file: str
    key: str
    source_start: int
    source_stop: int
    target: int
    offset: int


def plan_copies(tensors: Mapping[str, TensorEntry], wants: Iterable[Want]) -> list[Copy]:
    """Copies that fill every want, in the order of files and of elements in them, so that disks are read forwards.

    ``tensors`` covers each element once (``Manifest.check``). A want looks at all pieces of its tensor.
    Raises CheckpointError for a want that is not in the checkpoint.
    """
    ordered = {name: sorted(entry.pieces, key=lambda piece: piece.start) for name, entry in tensors.items()}
    copies: list[Copy] = []
    for want in wants:
        if want.name not in ordered or not 0 <= want.start <= want.stop <= tensors[want.name].numel:
            size = tensors[want.name].numel if want.name in ordered else None
            raise CheckpointError(
                "not in the checkpoint",
                where=want.name,
                got=f"elements {want.start} to {want.stop} wanted",
                expected="no such tensor" if size is None else f"0 to {size}",
            )
        for piece in ordered[want.name]:
            low, high = max(want.start, piece.start), min(want.stop, piece.stop)
            if low < high:
                first = low - piece.start
                copies.append(Copy(piece.file, piece.key, first, first + high - low, want.target, low - want.start))
    return sorted(copies)
