"""Keep an exponential moving average of the weights, as one more column of the sharded optimizer's
state.

Of the weights w after applied step n = 1, 2, ... (a skipped step does not count), with
k = floor((n - 1 - update_after_step) / update_every):

    k <= 0    average = w
    k > 0     average = average + (1 - d) (w - average), in the steps in which k grows
    d         decay, or with a warm-up min(decay, 1 - (1 + k / inv_gamma)^-power)

With a constant decay these are torch's AveragedModel with get_ema_multi_avg_fn(decay), bit for bit;
the warm-up is that of diffusers' EMAModel.

The column is sharded as the masters are and has their dtype, fp32. Between steps it is in the
optimizer's state under "ema", so checkpoints, offload and ``safe_get_*`` treat it as a moment.
During a step the optimizer does not see it: many classes recognize a first step by empty state.

Cost: 4 bytes per parameter / N between steps; an update is local. To compute with the averages,
each element is swapped with its master, and the masters are published as after a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zero_trial.ds_config.keys_training import EmaSection
from zero_trial.errors import TrialError

KIND = "ema"  # the column's name in the optimizer's state

_CHUNK = 1 << 22  # elements that are swapped at a time


def share(ema: EmaSection, step: int) -> float | None:
    """Return how far the average moves toward the weights after applied step ``step`` (from 1):
    1 - d; 1.0 copies the weights, None skips the update."""
    past = step - 1 - ema.update_after_step
    if past <= 0:
        return 1.0
    if past % ema.update_every:
        return None
    if not ema.use_ema_warmup:
        return 1 - ema.decay
    warm: float = 1 - (1 + past // ema.update_every / ema.inv_gamma) ** -ema.power
    return 1 - min(ema.decay, warm)


class WeightAverage:
    """The column, and how many applied steps it has seen (``steps``). Methods take the weights that
    the optimizer steps on, and its state by weight. ``swapped``: the masters hold the averages."""

    def __init__(self, settings: EmaSection) -> None:
        self._settings = settings
        self.steps = 0
        self.swapped = False

    @contextmanager
    def following(
        self, weights: Sequence[torch.Tensor], state: MutableMapping[torch.Tensor, dict[str, Any]]
    ) -> Iterator[None]:
        """Move the averages after the block, in which the optimizer steps ``weights``. Local.

        A weight without an average starts with its value before the step as the average: in a first
        step, and after loading a checkpoint without averages.
        """
        averages: list[torch.Tensor] = []
        for weight in weights:
            average = state[weight].pop(KIND, None) if weight in state else None
            averages.append(weight.detach().clone() if average is None else average)
        try:
            yield
            if any(KIND in state.get(weight, ()) for weight in weights):
                raise TrialError(
                    "the optimizer has a state with the same name as the average of the weights",
                    where="ds_config ema",
                    got=f'a state "{KIND}"',
                    fix='Remove "ema" from ds_config, or rename the state in the optimizer.',
                )
            part = share(self._settings, self.steps)
            if part is not None and averages:
                now = [weight.detach() for weight in weights]
                torch._foreach_copy_(averages, now) if part == 1.0 else torch._foreach_lerp_(averages, now, part)
        finally:
            for weight, average in zip(weights, averages, strict=True):
                state.setdefault(weight, {})[KIND] = average

    @torch.no_grad()
    def swap(self, weights: Sequence[torch.Tensor], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Swap weights and averages. Local."""
        for weight in weights:
            if (average := state.get(weight, {}).get(KIND)) is None:
                continue  # the average starts with the weight's own value
            parts = zip(weight.detach().view(-1).split(_CHUNK), average.view(-1).split(_CHUNK), strict=True)
            for here, there in parts:
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)
        self.swapped = not self.swapped

    def restart(self, state: Mapping[torch.Tensor, dict[str, Any]], steps: int | None) -> None:
        """Drop the column, as if ``steps`` steps had been applied (None: up to the last step that
        copies the weights): the average starts with the weights as of before the next step."""
        self.steps = 1 + self._settings.update_after_step if steps is None else steps
        for own in state.values():
            own.pop(KIND, None)

    def require_trained_weights(self, where: str) -> None:
        """Raise TrialError while averages replace the weights."""
        if self.swapped:
            raise TrialError(
                "inside engine.ema_weights() the averages replace the weights: they can be evaluated and exported, but not trained or saved",
                where=where,
                got="a call inside that block",
                fix="Exit the block first.",
            )
