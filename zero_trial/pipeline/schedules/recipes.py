"""A recipe: a schedule's name, its generator, and where its chunks lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.pipeline.actions import Action
from zero_trial.pipeline.placement import Placement
from zero_trial.pipeline.schedule import Schedule
from zero_trial.pipeline.schedules.gpipe import gpipe
from zero_trial.pipeline.schedules.inference import inference
from zero_trial.pipeline.schedules.interleaved import interleaved
from zero_trial.pipeline.schedules.looped_bfs import looped_bfs
from zero_trial.pipeline.schedules.one_f_one_b import one_f_one_b
from zero_trial.pipeline.schedules.zb_h1 import zb_h1
from zero_trial.pipeline.schedules.zb_v import zb_v

Generate = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, pipeline stages, micro-batches, chunks per rank) -> the rank's computations."""


@dataclass(frozen=True)
class Recipe:
    """``chunks`` is how many a rank has when the caller does not say; ``fixed`` that it cannot be another number."""

    generate: Generate
    summary: str
    chunks: int = 1
    fixed: bool = True
    training: bool = True
    place: Callable[[int, int], Placement] = Placement.loop


def _plain(generate: Callable[[int, int, int], Iterator[Action]]) -> Generate:
    return lambda rank, stages, micro_batches, chunks: generate(rank, stages, micro_batches)


RECIPES: Mapping[str, Recipe] = {
    "gpipe": Recipe(_plain(gpipe), "all forwards, then all backwards"),
    "1f1b": Recipe(_plain(one_f_one_b), "one backward for each forward after the first few; DeepSpeed's"),
    "interleaved": Recipe(interleaved, "1F1B over several chunks per rank", chunks=2, fixed=False),
    "looped_bfs": Recipe(looped_bfs, "all micro-batches through one chunk after the other", chunks=2, fixed=False),
    "zb_h1": Recipe(_plain(zb_h1), "1F1B with weight gradients apart, in 1F1B's memory"),
    "zb_v": Recipe(
        _plain(zb_v),
        "two chunks per rank, down and up, weight gradients apart",
        2,
        place=lambda stages, _: Placement.v(stages),
    ),
    "inference": Recipe(inference, "forwards only", fixed=False, training=False),
}


def build(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule ``name`` as computations alone; ``chunks`` is per rank. Raises ConfigError for what the recipe cannot do."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(
            "unknown schedule", where="pipeline.schedule", got=repr(name), expected="one of " + ", ".join(RECIPES)
        )
    for what, number in (("pipeline stages", stages), ("micro-batches", micro_batches), ("chunks per rank", chunks)):
        if number is not None and number < 1:
            raise ConfigError(f"a schedule needs {what}", where=f"schedule {name}", got=number, expected="1 or more")
    count = recipe.chunks if chunks is None else chunks
    if recipe.fixed and count != recipe.chunks:
        several = ", ".join(other for other, row in RECIPES.items() if not row.fixed)
        raise ConfigError(
            "the number of chunks per rank cannot be chosen",
            where=f"schedule {name}",
            got=count,
            expected=recipe.chunks,
            fix=f"It can for {several}.",
        )
    rows = tuple(tuple(recipe.generate(rank, stages, micro_batches, count)) for rank in range(stages))
    return Schedule(name, recipe.place(stages, count), micro_batches, rows, training=recipe.training)
