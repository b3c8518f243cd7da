"""One rank of a trial that is a task of a Determined cluster: join the ranks, open the platform,
train, and end.

A task ends with exit code 0 if its trial was trained, or preempted and saved, or if its
hyperparameters cannot be trained, which is reported to the master. Any other code is a crash, after
which the master starts the trial again, up to max_restarts times.

An entrypoint ``model_def:MyTrial`` runs inside Determined's own harness, which expects its own
classes; :func:`install` provides them:

harness                                     here
issubclass(MyTrial, det.LegacyTrial)        ZeroTrial is registered as a virtual subclass
Controller.pre_execute_hook(env, backend)   nothing: the ranks join each other later
MyTrial.trial_context_class(core, env)      the core.Context is kept
MyTrial(context)                            deferred: an error in it must end the task like any
                                            other, reported once
Controller.from_trial(...).run()            the same as ``python -m zero_trial.run``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import zero_trial
from zero_trial.comm.rendezvous import destroy_distributed, init_distributed, open_exit_notice
from zero_trial.errors import InvalidHP
from zero_trial.trial import ZeroTrial, ZeroTrialContext
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.reporting import End
from zero_trial.trial.runtime.determined import DeterminedPlatform, harness_bases, invalid_hp_class, open_platform
from zero_trial.trial.runtime.rank import (
    EventLog,
    RankState,
    Trained,
    TrialFactory,
    done_event,
    figures_of,
    rank_world,
    report_error,
    train,
)

EARLY_EXIT = "early exit"

_Train = Callable[[Callable[[DeterminedPlatform], TrialFactory], Any], None]


@contextmanager
def open_task(state: RankState, core_context: Any = None, *, script: bool = False) -> Iterator[DeterminedPlatform]:
    """Collective. Join the ranks and keep the trial's platform open, from this rank's first line to
    its last.

    An error in the block is printed at once. Then the platform closes (it may still have
    TensorBoard files to copy), and the process exits with the error's exit code. Hyperparameters
    that cannot be trained are reported to the master, once, and every rank exits with code 0.

    Args:
        core_context: an open core.Context to use, which stays open; otherwise the platform opens
            its own.
        script: errors that do not belong to this package are raised unchanged.
    """
    ending: BaseException | None = None
    cleanup = ExitStack()
    try:
        state.env = init_distributed()
        cleanup.callback(destroy_distributed)
        log, notice = EventLog(), open_exit_notice()
        cleanup.callback(notice.close)
        cleanup.callback(log.close)
        notice.watch(EARLY_EXIT)
        with open_platform(
            rank_world(state.env), notice.claim, log, launched=state.env.launched, core_context=core_context
        ) as platform:
            try:
                yield platform
            except (Exception, KeyboardInterrupt) as error:
                if is_invalid_hp(error):
                    platform.report_early_exit("INVALID_HP")
                    sys.stderr.write(f"hyperparameters that cannot be trained: {error}\n")
                    ending = SystemExit(0)
                elif notice.claimed(EARLY_EXIT):
                    # another rank has ended the trial, and this one lost its connection
                    ending = SystemExit(0)
                else:
                    ending = report_error(error, script=script)
    except (Exception, KeyboardInterrupt) as error:
        if ending is None:
            ending = report_error(error, script=script)
        else:  # the first error decides how the process ends
            sys.stderr.write(f"note    closing the platform failed: {type(error).__name__}: {error}\n")
    finally:
        cleanup.close()
    if ending is not None:
        raise ending


def train_task(
    load: Callable[[DeterminedPlatform], TrialFactory],
    engine_factory: EngineFactory,
    core_context: Any = None,
) -> None:
    """Collective. Train the trial whose class ``load`` returns, once the ranks have joined."""
    state = RankState()
    with open_task(state, core_context) as platform:
        if (platform.experiment.get("profiling") or {}).get("enabled"):
            platform.profile_system()
        finish_task(train(load(platform), platform, state, engine_factory), platform)


def finish_task(trained: Trained, platform: DeterminedPlatform) -> None:
    """Collective. Print a trained trial's figures; its memory figures also go to the master."""
    if trained.watch is not None and (kept := trained.watch.summary()):
        platform.keep(kept)
    # A preempted trial continues later: its figures are partial.
    figures = figures_of(trained) if trained.outcome.end is not End.PREEMPTED else {}
    if platform.distributed.rank == 0:
        platform.emit(done_event(trained.outcome, figures))


def is_invalid_hp(error: BaseException) -> bool:
    """Return whether the error is this package's InvalidHP or Determined's own."""
    theirs = invalid_hp_class()
    return isinstance(error, InvalidHP) or (theirs is not None and isinstance(error, theirs))


@dataclass(frozen=True)
class _HarnessContext:
    """The objects that the harness passes to a trial. Only its open core.Context is used."""

    core: Any
    env: Any


@dataclass(frozen=True)
class _DeferredTrial:
    """A trial that the harness requested; it is built once the ranks have joined."""

    kind: type[ZeroTrial]

    def build(self, context: ZeroTrialContext) -> ZeroTrial:
        trial = object.__new__(self.kind)  # bypass ZeroTrial.__new__, which defers
        trial.__init__(context)  # type: ignore[misc]
        return trial


def install(train: _Train = lambda load, core: train_task(load, zero_trial.initialize, core)) -> None:
    """Make ZeroTrial a class that the harness accepts.

    Use this only in the harness's own process: calling a trial with the harness's context is
    deferred there.
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
    # The harness takes no arguments and has no registry: it reads both classes from the user's
    # class, which derives from ZeroTrial, and calls it. There is no other hook, so the three names
    # are set here, on ZeroTrial, and nowhere else.
    for name, value in (
        ("trial_controller_class", Bridge),
        ("trial_context_class", _HarnessContext),
        ("__new__", staticmethod(new)),
    ):
        setattr(ZeroTrial, name, value)
