"""A trial as a task of a Determined master: joins the ranks, opens the platform, and ends as the master understands it.

exit code 0   trained; or preempted, acknowledged and saved; or hyperparameters that cannot be trained, told once
any other     a crash: the master starts the trial again from its last checkpoint, up to max_restarts times
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero_trial.errors import InvalidHP, ZeroTrialError
from zero_trial.fronts.local import print_error
from zero_trial.fronts.log import EventLog, done_event
from zero_trial.fronts.rank import RankState, Trained, TrialFactory, figures_of, known, train, world
from zero_trial.mesh.farewell import Farewell
from zero_trial.mesh.world import destroy_distributed, init_distributed, open_farewell
from zero_trial.platform.cluster import ClusterPlatform
from zero_trial.platform.determined import invalid_hp_class, open_platform
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.outcome import End

EARLY_EXIT = "early exit"


@contextmanager
def joined(state: RankState, core_context: Any = None) -> Iterator[tuple[ClusterPlatform, Farewell]]:
    """Collective. This rank among the others, with the cluster's platform; both are left at the end."""
    state.env = init_distributed()
    log, farewell = EventLog(), open_farewell()
    farewell.watch(EARLY_EXIT)
    try:
        with open_platform(
            world(state.env), farewell.claim, log, launched=state.env.launched, core_context=core_context
        ) as platform:
            yield platform, farewell
    finally:
        log.close()
        farewell.close()
        destroy_distributed()


def run_on_cluster(load: Callable[[], TrialFactory], engine_factory: EngineFactory, core_context: Any = None) -> int:
    """Trains the experiment's trial; returns the exit code. Collective."""
    state = RankState()
    ending = Ending()
    with ending, joined(state, core_context) as (platform, farewell), ending.of(platform, farewell):
        if (platform.experiment.get("profiling") or {}).get("enabled"):
            platform.profile_system()
        trained = train(load(), platform, state, engine_factory)
        keep_memory(trained, platform)
        say_end(trained)
    return ending.code


class Ending:
    """Turns whatever ends a rank into an exit code, in two layers: inside the platform, where an early end can be told
    to the master, and around it, for what fails while it opens and closes.
    """

    def __init__(self) -> None:
        self.code = 0

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, (Exception, KeyboardInterrupt)):
            return False
        self._fail(error)
        return True

    @contextmanager
    def of(self, platform: ClusterPlatform, farewell: Farewell) -> Iterator[None]:
        """What the block raises is told to the master if it is an early end, and printed otherwise."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if is_invalid_hp(error):
                platform.report_early_exit("INVALID_HP")
                sys.stderr.write(f"hyperparameters that cannot be trained: {error}\n")
            elif not farewell.claimed(EARLY_EXIT):  # else this is only the echo of another rank's leaving
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        error = known(error)
        print_error(error)
        self.code = self.code or (error.exit_code if isinstance(error, ZeroTrialError) else 1)


def is_invalid_hp(error: BaseException) -> bool:
    """Ours, or Determined's own."""
    theirs = invalid_hp_class()
    return isinstance(error, InvalidHP) or (theirs is not None and isinstance(error, theirs))


def keep_memory(trained: Trained, platform: ClusterPlatform) -> None:
    """Rank 0: what was planned and measured, for whoever compares trials."""
    figures = trained.watch.summary() if trained.watch is not None else {}
    if figures:
        platform.keep(figures)


def say_end(trained: Trained) -> None:
    """Collective. The last event, on rank 0; that of a run that is not to go on has the run's figures."""
    figures = figures_of(trained) if trained.outcome.end is not End.PREEMPTED else {}
    if trained.context.distributed.rank == 0:
        trained.context.platform.progress.emit(done_event(trained.outcome, figures))
