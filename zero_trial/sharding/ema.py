"""Keep an exponential moving average of the weights, as one more column of the sharded optimizer's
state.

Of the weights w after applied step n = 1, 2, ... (a skipped step does not count), with
k = floor((n - 1 - update_after_step) / update_every):

    k <= 0    average = w
    k > 0     average = average + (1 - d) (w - average), in the steps in which k grows
    d         decay, or with a warm-up min(decay, 1 - (1 + k / inv_gamma)^-power)

With a constant decay these are torch's AveragedModel with get_ema_multi_avg_fn(decay), bit for bit;
the warm-up is that of diffusers' EMAModel.

The column is cut as the masters are and has their dtype, fp32. It is in the optimizer's state under
"ema" between steps, so wherever masters and moments live: on the device, in host memory, in a file,
or, for a tensor that is updated whole, with its owner. Checkpoints and ``safe_get_*`` find it as
they find moments. During a step the optimizer does not see it: many classes take an empty state for
a first step, and some walk over all that is there.

Price: 4 bytes per parameter / N between steps. An update is local, with no collective, and reads or
writes 12 bytes per element (8 in the steps with k = 0). To compute with the averages, each element
and its master change places, and the masters are published as after a step: no second copy of the
model is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.errors import TrialError

KIND = "ema"  # the column's name in the optimizer's state

_CHUNK = 1 << 22  # elements that change places at a time


@dataclass(frozen=True)
class EmaSchedule:
    """Which steps move the average, and how far; the fields are keys of ds_config's ``ema``.

    ``inv_gamma`` None: the decay has no warm-up.
    """

    decay: float
    update_after_step: int = 0
    update_every: int = 1
    inv_gamma: float | None = None
    power: float = 2 / 3

    @property
    def first(self) -> int:
        """The last step after which the average is the weights."""
        return self.update_after_step + 1

    def share(self, step: int) -> float | None:
        """Return how far the average moves to the weights after applied step number ``step`` (from
        1): 1 - d; 1.0 makes it the weights, None leaves it."""
        past = step - self.first
        if past <= 0:
            return 1.0
        if past % self.update_every:
            return None
        decay = self.decay
        if self.inv_gamma is not None:
            decay = min(decay, 1 - (1 + past // self.update_every / self.inv_gamma) ** -self.power)
        return 1 - decay


class WeightAverage:
    """The column, and how many steps it has seen.

    Methods take the weights that the optimizer steps on, and its state by weight. ``swapped``: the
    column holds the weights and the masters hold the averages.
    """

    def __init__(self, schedule: EmaSchedule) -> None:
        self.schedule = schedule
        self.steps = 0  # that were applied
        self.swapped = False

    def begin_step(self) -> None:
        """Count a step; :meth:`following` comes next, for some of the weights at a time."""
        self.require_trained_weights("engine.step")
        self.steps += 1

    @contextmanager
    def following(
        self,
        weights: Sequence[torch.Tensor],
        state: MutableMapping[torch.Tensor, dict[str, Any]],
    ) -> Iterator[None]:
        """Move the averages after the block, in which the optimizer steps ``weights`` and does not
        see the column. Local.

        A weight without an average gets its value of before the step as one: in a first step, and
        after a checkpoint that has none was read.
        """
        own = {weight: state[weight].pop(KIND, None) if weight in state else None for weight in weights}
        averages = {weight: weight.detach().clone() if average is None else average for weight, average in own.items()}
        try:
            yield
            if any(KIND in state.get(weight, {}) for weight in averages):
                raise TrialError(
                    "the optimizer has state of its own under the name of the average of the weights",
                    where="ds_config ema",
                    got=f'state "{KIND}"',
                    fix='Remove "ema" from ds_config, or rename the state.',
                )
            share = self.schedule.share(self.steps)
            if share is not None and averages:
                _move(list(averages.values()), [weight.detach() for weight in averages], share)
        finally:
            for weight, average in averages.items():
                state.setdefault(weight, {})[KIND] = average

    @torch.no_grad()
    def swap(self, weights: Sequence[torch.Tensor], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Let weights and averages change places. Local."""
        for weight in weights:
            if (average := state.get(weight, {}).get(KIND)) is None:
                continue  # it begins with the weight's own value
            parts = zip(weight.detach().view(-1).split(_CHUNK), average.view(-1).split(_CHUNK), strict=True)
            for here, there in parts:
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)
        self.swapped = not self.swapped

    def restart(self, state: Mapping[torch.Tensor, dict[str, Any]], steps: int) -> None:
        """Drop the column, as if ``steps`` steps had been applied: the average begins with the
        weights as they are before the next."""
        self.steps = steps
        for own in state.values():
            own.pop(KIND, None)

    def require_trained_weights(self, where: str) -> None:
        """Raise TrialError while averages replace the weights."""
        if self.swapped:
            raise TrialError(
                "the averages replace the weights: they can be evaluated and exported, not trained or saved",
                where=where,
                got="a call inside engine.ema_weights()",
                fix="Leave the block first.",
            )


def edited_averages() -> TrialError:
    """Return the error for averages that user code has changed while they replaced the weights."""
    return TrialError(
        "weights were changed where the averages are in their place: the averages have the change, and the weights do not",
        where="engine.ema_weights",
        got="an edit of parameters inside the block",
        fix="Change weights outside of the block; to set an average, use safe_set_full_optimizer_state(param, value, "
        '"ema") there.',
    )


@torch.no_grad()
def _move(averages: list[torch.Tensor], weights: list[torch.Tensor], share: float) -> None:
    """Move each average to its weight by ``share``."""
    if share == 1.0:
        torch._foreach_copy_(averages, weights)
    else:
        torch._foreach_lerp_(averages, weights, share)
