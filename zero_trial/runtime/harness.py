"""The entrypoint ``model_def:MyTrial``: a trial inside of Determined's own harness, which asks for
classes of its own.

harness                                     here
issubclass(MyTrial, det.LegacyTrial)        ZeroTrial is registered as a virtual subclass
Controller.pre_execute_hook(env, backend)   nothing: the ranks join each other later
MyTrial.trial_context_class(core, env)      the core.Context is kept
MyTrial(context)                            deferred: an error in it must end the task like any
                                            other, reported once
Controller.from_trial(...).run()            the same as ``python -m zero_trial.run``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zero_trial
from zero_trial.runtime.determined import DeterminedPlatform, harness_bases
from zero_trial.runtime.rank import TrialFactory
from zero_trial.runtime.task import train_task
from zero_trial.trial import ZeroTrial, ZeroTrialContext

_Train = Callable[[Callable[[DeterminedPlatform], TrialFactory], Any], None]


@dataclass(frozen=True)
class _HarnessContext:
    """Holds what the harness gives a trial. Only the open core.Context in it is used."""

    core: Any
    env: Any


@dataclass(frozen=True)
class _DeferredTrial:
    """A trial that the harness has asked for; it is built once the ranks have joined."""

    kind: type[ZeroTrial]

    def build(self, context: ZeroTrialContext) -> ZeroTrial:
        trial = object.__new__(self.kind)  # past ZeroTrial.__new__, which defers
        trial.__init__(context)  # type: ignore[misc]
        return trial


def _train_deferred(load: Callable[[DeterminedPlatform], TrialFactory], core_context: Any) -> None:
    """Train with this package's engine inside of ``core_context``."""
    train_task(load, zero_trial.initialize, core_context)


def install(train: _Train = _train_deferred) -> None:
    """Make ZeroTrial a class that the harness accepts.

    For the harness's own process only: there, a trial that is called with the harness's context is
    deferred.
    """
    legacy_trial, trial_controller = harness_bases()

    class Bridge(trial_controller):  # type: ignore[misc, valid-type]
        """The harness's controller: starts the training of the deferred trial."""

        def __init__(self, trial: _DeferredTrial, context: _HarnessContext) -> None:
            self._trial = trial
            self._core = context.core

        @classmethod
        def pre_execute_hook(cls, env: Any, distributed_backend: Any) -> None:
            """Do nothing: ``run`` joins the ranks."""

        @classmethod
        def from_trial(cls, trial_inst: Any, context: Any, env: Any, workloads: Any = None) -> Bridge:
            return cls(trial_inst, context)

        def run(self) -> None:
            train(lambda platform: self._trial.build, self._core)

    def new(kind: type[ZeroTrial], context: Any = None, *args: Any, **options: Any) -> Any:
        return _DeferredTrial(kind) if isinstance(context, _HarnessContext) else object.__new__(kind)

    legacy_trial.register(ZeroTrial)  # type: ignore[attr-defined]
    # The harness takes no arguments and has no registry: it reads the two classes off the user's
    # class, which derives from ZeroTrial, and calls it. No other door leads into it, so the three
    # names are set here, on ZeroTrial, and nowhere else.
    for name, value in (
        ("trial_controller_class", Bridge),
        ("trial_context_class", _HarnessContext),
        ("__new__", staticmethod(new)),
    ):
        setattr(ZeroTrial, name, value)
