"""The schedules by name: one generator of a rank's computations each, without messages and without sharding. Pure."""

from __future__ import annotations

from zero_trial.pipeline.schedules.recipes import RECIPES, Recipe, build

__all__ = ["RECIPES", "Recipe", "build"]
