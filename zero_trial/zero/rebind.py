"""A client's optimizer object, made to step on pieces of the shards instead of the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_trial.errors import ConfigError
from zero_trial.zero.store import ShardPiece


def rebind(base: torch.optim.Optimizer, pieces: Sequence[ShardPiece]) -> None:
    """Makes a client's optimizer object step on ``pieces`` instead of the model's parameters; its groups and settings stay.

    Raises ConfigError when it already holds state: that state belongs to whole tensors that this rank no longer has.
    """
    eager = isinstance(base, torch.optim.Adagrad)  # the one torch optimizer that makes its state when it is built

    def has_stepped(state: Mapping[str, Any]) -> bool:
        telling = (
            [state["step"]]
            if eager
            else [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
        )
        return any(bool(value.any()) for value in telling)

    if any(has_stepped(state) for state in base.state.values()):
        raise ConfigError(
            "the client optimizer has stepped before it was given to initialize()",
            where="optimizer",
            fix="Pass a fresh optimizer and load its state with engine.load_checkpoint.",
        )
    base.state.clear()
    for index, group in enumerate(base.param_groups):
        group["params"] = [piece.weight for piece in pieces if piece.group == index]
    if eager:
        for group in base.param_groups:
            for weight in group["params"]:
                base.state[weight] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(weight, group["initial_accumulator_value"]),
                }
