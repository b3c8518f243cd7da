"""Does a checkpoint hold what a model wants? Names and shapes compared, and the differences said in one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_trial.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """``missing``: wanted, not stored. ``extra``: stored, not wanted. ``shapes``: name -> (stored, wanted)."""

    stored: int
    wanted: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def describe(self) -> str:
        """``checkpoint has 48 tensors, model has 50. Missing: head.bias. Shape differs: wte (50257, 768) vs (50304,
        768)``"""
        text = [f"checkpoint has {self.stored} tensors, model has {self.wanted}"]
        text += [f"Missing: {_shortened(self.missing)}"] if self.missing else []
        text += [f"Not in the model: {_shortened(self.extra)}"] if self.extra else []
        differing = [f"{name} {stored} vs {wanted}" for name, (stored, wanted) in sorted(self.shapes.items())]
        text += [f"Shape differs: {_shortened(differing)}"] if differing else []
        return ". ".join(text)


def compare(stored: Shapes, wanted: Shapes) -> Difference:
    """All differences between the tensors of a checkpoint and those of a model."""
    return Difference(
        len(stored),
        len(wanted),
        missing=tuple(sorted(wanted.keys() - stored.keys())),
        extra=tuple(sorted(stored.keys() - wanted.keys())),
        shapes={
            name: (tuple(stored[name]), tuple(shape))
            for name, shape in wanted.items()
            if name in stored and tuple(stored[name]) != tuple(shape)
        },
    )


def require_match(
    stored: Shapes, wanted: Shapes, *, where: str, allow_missing: bool = False, allow_extra: bool = False
) -> None:
    """Raises CheckpointError with every difference that is not allowed; another shape is never allowed."""
    difference = compare(stored, wanted)
    if difference.shapes or (difference.missing and not allow_missing) or (difference.extra and not allow_extra):
        raise CheckpointError(
            difference.describe(), where=where, fix="Build the model as it was when the checkpoint was saved."
        )


def _shortened(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
