"""The entrypoint ``model_def:MyTrial``: a trial inside Determined's own harness, which asks for classes of its own.

harness                                     here
issubclass(MyTrial, det.LegacyTrial)        ZeroTrial is registered as a virtual subclass
Controller.pre_execute_hook(env, backend)   nothing: the ranks join each other later
MyTrial.trial_context_class(core, env)      the core.Context is kept
MyTrial(context)                            not built yet: an error in it must end as any other, told once
Controller.from_trial(...).run()            the same as the front ``python -m zero_trial.run``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zero_trial
from zero_trial.runtime.determined import harness_bases
from zero_trial.runtime.open import run_on_cluster
from zero_trial.trial import ZeroTrial, ZeroTrialContext

Run = Callable[[Callable[[], Callable[[ZeroTrialContext], ZeroTrial]], Any], int]


@dataclass(frozen=True)
class HarnessContext:
    """What the harness makes as a trial's context: all that is used of it is the open core.Context."""

    core: Any
    env: Any


@dataclass(frozen=True)
class DeferredTrial:
    """A trial that the harness has asked for and that is built once the ranks have met."""

    kind: type[ZeroTrial]

    def build(self, context: ZeroTrialContext) -> ZeroTrial:
        trial = object.__new__(self.kind)  # past ZeroTrial.__new__, which postpones
        trial.__init__(context)  # type: ignore[misc]
        return trial


def train_deferred(load: Callable[[], Callable[[ZeroTrialContext], ZeroTrial]], core_context: Any) -> int:
    """Trains with this package's engine inside of ``core_context``; the exit code."""
    return run_on_cluster(load, zero_trial.initialize, core_context)


def install(run: Run = train_deferred) -> None:
    """Makes ZeroTrial something that the harness accepts. For the harness's own process only: there, a trial that is
    called with the harness's context is postponed.
    """
    legacy_trial, trial_controller = harness_bases()

    class Bridge(trial_controller):  # type: ignore[misc, valid-type]
        """The harness's controller: hands the trial over."""

        def __init__(self, trial: DeferredTrial, context: HarnessContext) -> None:
            self._trial = trial
            self._core = context.core

        @classmethod
        def pre_execute_hook(cls, env: Any, distributed_backend: Any) -> None:
            """Nothing: ``run`` joins the ranks."""

        @classmethod
        def from_trial(cls, trial_inst: Any, context: Any, env: Any, workloads: Any = None) -> Bridge:
            return cls(trial_inst, context)

        def run(self) -> None:
            code = run(lambda: self._trial.build, self._core)
            if code:
                raise SystemExit(code)

    def new(kind: type[ZeroTrial], context: Any = None, *args: Any, **options: Any) -> Any:
        return DeferredTrial(kind) if isinstance(context, HarnessContext) else object.__new__(kind)

    legacy_trial.register(ZeroTrial)  # type: ignore[attr-defined]
    for name, value in (
        ("trial_controller_class", Bridge),
        ("trial_context_class", HarnessContext),
        ("__new__", staticmethod(new)),
    ):
        setattr(ZeroTrial, name, value)
