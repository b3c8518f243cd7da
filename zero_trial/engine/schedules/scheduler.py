"""Steps along a curve and writes its values into an optimizer's parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from zero_trial.engine.schedules.curves import Curve, Momenta
from zero_trial.errors import CheckpointError


class HasGroups(Protocol):
    """What a scheduler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class CurveScheduler:
    """The scheduler object that the engine and the user see: ``step`` once per applied optimizer step.

    Construction writes the values of iteration -1, the ones of the first optimizer step.
    """

    def __init__(self, optimizer: HasGroups, curve: Curve, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.curve = curve
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """To the next iteration, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def get_lr(self) -> list[float]:
        """The curve's value now, one per group."""
        return self.curve.lrs(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The same under torch's name."""
        return self.get_lr()

    def get_mom(self) -> Momenta | None:
        """The betas that the curve sets, or None where it leaves them alone."""
        return self.curve.betas(self.last_batch_iteration)

    def state_dict(self) -> dict[str, int]:
        """JSON-able: the curve itself comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved iteration; the groups get its values at once."""
        if "last_batch_iteration" not in state:
            raise CheckpointError(
                "this is not the state of a schedule by DeepSpeed's name",
                where="lr_scheduler",
                got=sorted(state),
                expected=["last_batch_iteration"],
            )
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            own = group.get("lr")
            group["lr"] = torch.full_like(own, lr) if isinstance(own, torch.Tensor) else lr
        momenta = self.get_mom()
        if momenta is not None:
            for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = betas
