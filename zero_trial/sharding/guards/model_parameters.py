"""Detect changes of a model's set of parameters after its engine was built, and trained parameters
that receive no gradient."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.errors import TrialError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.util.text import listed

log = logging.getLogger("zero_trial")


class ParameterTable:
    """The parameters of ``module`` when its engine was built: names, dtypes, and which are trained;
    and which of these have received a gradient since the last step.

    Later changes would be neither trained nor saved, and checkpoints with a new tie could not be
    loaded into a model that is built with the tie. The table is compared at the first step, at
    ``engine.train()`` and ``engine.eval()``, and at each save; a change between two of these is
    detected at the next one.

    A step in which some parameters received no gradient is an error if that is ``forbidden``;
    otherwise the first such step is logged, and so is the first step without any gradient.
    """

    def __init__(self, module: nn.Module, grad_buffers: Sequence[GradBuffer], *, forbidden: bool) -> None:
        self._module = module
        self._grad_buffers = grad_buffers
        self._forbidden = self._logged = self._none_logged = forbidden
        self._count = sum(len(buffer.group.params) for buffer in grad_buffers)
        # parameter -> whether it is trained, and its dtype
        self._trained = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()  # parameter -> its first name
        for name, param in module.named_parameters():
            self._trained[param], self._names[param] = (param.requires_grad, param.dtype), name
        self._places = frozenset(self._names.values())
        self._stepped = False

    def before_step(self, step: int) -> TrialError | None:
        """Call :meth:`check` before the first step; return the error, if that is forbidden, for
        parameters without a gradient since ``step`` that are not frozen now."""
        if not self._stepped:
            self.check("engine.step")
            self._stepped = True
        if not self._forbidden:
            return None
        names = [
            buffer.group.layout.slots[index].name
            for buffer in self._grad_buffers
            for index in sorted(buffer.without_gradient())
            if buffer.group.params[index].requires_grad
        ]
        if not names:
            return None
        return TrialError(
            "unused parameters: they got no gradient, and ds_config forbids that",
            where="engine.step",
            got=f"{listed(names)} since step {step}",
            expected="a gradient for every trainable parameter (zero_optimization.ignore_unused_parameters is false)",
            fix="Use them in the loss, freeze them before initialize(), or remove ignore_unused_parameters.",
        )

    def check(self, where: str) -> None:
        """Raise TrialError for parameters that were added, unfrozen, tied, or cast since. Reads
        only names and flags. Local.

        Frozen parameters may be added under new names (a moving average, a metric's network): a
        checkpoint has them, too.
        """
        fresh, unfrozen, cast, known = [], [], [], 0
        for name, param in self._module.named_parameters():
            if param not in self._trained:
                if param.requires_grad or name in self._places:
                    fresh.append(name)
                continue
            known += 1
            if param.requires_grad and not self._trained[param][0]:
                unfrozen.append(name)
            elif self._trained[param][0] and self._trained[param][1] != param.dtype:
                cast.append(name)
        tied = self._tied() if known < len(self._places) else []
        for names, what, fix in (
            (
                fresh,
                "the model has parameters that were added after its engine was built, and that are not trained",
                "Change the model before initialize(); to change it later, save a checkpoint and initialize() again.",
            ),
            (
                unfrozen,
                "parameters were unfrozen after the engine was built, and are not trained",
                "Set requires_grad before initialize(); to unfreeze later, save a checkpoint and initialize() again.",
            ),
            (
                tied,
                "parameters were tied after the engine was built: its checkpoints would not match a tied model",
                "Tie before initialize() (b.weight = a.weight); to tie later, build the model again, tie it, and initialize() again.",
            ),
            (
                cast,
                "parameters have a different dtype than their engine trains",
                "Call model.half(), .to(dtype) and the like before initialize(), and set the precision in ds_config (bf16, fp16).",
            ),
        ):
            if names:
                raise TrialError(what, where=where, got=listed(names), fix=fix)

    def _tied(self) -> list[str]:
        """List new names of parameters that the model also has under their first name. A layer that
        moved to another index has one name, and is not a tie."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        owns = {name: self._names.get(now[name], name) for name in sorted(self._places & now.keys())}
        return [f"{name} is {own}" for name, own in owns.items() if own != name and now.get(own) is now[name]]

    def end_step(self, step: int, passes: int, *, logs: bool) -> None:
        """Log which parameters had no gradient in ``step`` if this rank ``logs``: the first time
        some had none, and the first time all had none after ``passes`` (without a pass no gradient
        is expected, as in a plan of the optimizer's state)."""
        if self._logged and self._none_logged:
            return
        found = []
        for buffer in self._grad_buffers:
            for index in sorted(buffer.unused):
                found.append((buffer.group.layout.slots[index].name, buffer.group.params[index]))
        if not found:
            return
        if len(found) == self._count:
            if passes and logs and not self._none_logged:
                log.warning(
                    "no gradient has reached any of the %d parameters on this rank in step %d: they were dropped between backward and step "
                    "(model.zero_grad()), or the loss belongs to another model. If no rank has a gradient, weight decay and momentum are still "
                    "applied",
                    *(self._count, step),
                )
            self._none_logged = self._none_logged or passes > 0
            return
        if logs and not self._logged:
            frozen = sum(not param.requires_grad for _, param in found)
            log.info(
                "no gradient has reached %s%s in a step. If no rank has one, the step treats the gradient as 0: weight decay and momentum are "
                "still applied, but torch would skip the parameter. Freeze it before initialize() (in mid-training: save a checkpoint, freeze, "
                "initialize() again), give it weight_decay 0, or make it an error with zero_optimization.ignore_unused_parameters: false",
                listed([name for name, _ in found]),
                f" ({frozen} frozen after initialize())" if frozen else "",
            )
        self._logged = True
