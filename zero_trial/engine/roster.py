"""The parameters that a model had when its engine was made: what is put into it later is trained by nobody, and saved by nobody."""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.errors import TrialError

SHOWN = 3  # names in a message


class Roster:
    """Of one module. It keeps no parameter alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = WeakTensorKeyDictionary()  # parameter -> whether it was to be trained
        self._names = frozenset(name for name, _ in module.named_parameters())
        for param in module.parameters():
            self._trained[param] = param.requires_grad

    def check(self, where: str) -> None:
        """Raises TrialError for parameters that came, or were unfrozen, after the engine was made. Reads names and flags only.

        Frozen ones under names of their own may come: nobody is to train them (a moving average, a metric's network), and a checkpoint has them.
        """
        fresh, unfrozen = [], []
        for name, param in self._module.named_parameters():
            if param not in self._trained:
                if param.requires_grad or name in self._names:
                    fresh.append(name)
            elif param.requires_grad and not self._trained[param]:
                unfrozen.append(name)
        if fresh:
            raise TrialError(
                "the model has parameters that came after its engine was made, and that nobody trains",
                where=where,
                got=_listed(fresh),
                fix="Change the model before initialize(); to change it later, save a checkpoint and initialize() anew.",
            )
        if unfrozen:
            raise TrialError(
                "parameters were unfrozen after the engine was made, and nobody trains them",
                where=where,
                got=_listed(unfrozen),
                fix="Set requires_grad before initialize(); to unfreeze later, save a checkpoint and initialize() anew.",
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
