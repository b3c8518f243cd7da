"""Determined itself, and nobody else imports it: the task's facts, a core.Context for a trial, the harness's base classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.platform.cluster import ClusterPlatform, Show, TensorboardSync, TrialFacts
from zero_trial.platform.protocols import Distributed


def installed() -> bool:
    """Whether Determined can be imported; it is not imported for that."""
    return find_spec("determined") is not None


def trial_facts() -> TrialFacts | None:
    """What the master told this task, or None where this is no trial's task of a cluster."""
    if not installed():
        return None
    import determined

    info = determined.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    trial = info.trial
    return TrialFacts(
        trial_id=str(trial.trial_id),
        experiment_id=str(trial.experiment_id),
        seed=trial.trial_seed,
        hparams=trial.hparams,
        experiment=trial._config,
        latest_checkpoint=info.latest_checkpoint,
        steps_completed=trial._steps_completed,
    )


def require_facts() -> TrialFacts:
    """``trial_facts``, or ConfigError with what is missing."""
    if not installed():
        raise ConfigError(
            "Determined is not installed in this image",
            where="cluster",
            fix="pip install 'zero_trial[determined]' in startup-hook.sh.",
        )
    facts = trial_facts()
    if facts is None:
        raise ConfigError("this is no trial's task of a Determined cluster", where="cluster")
    return facts


@contextmanager
def open_platform(
    distributed: Distributed,
    claim: Callable[[str], bool],
    show: Show,
    *,
    launched: bool,
    core_context: Any = None,
) -> Iterator[ClusterPlatform]:
    """Collective. This trial's platform, with a core.Context of its own unless one is given, which stays open then.

    ``launched``: a launch layer has set the rank variables, so that there may be several ranks.
    """
    from determined.tensorboard.util import get_rank_aware_path

    facts = require_facts()
    with ExitStack() as stack:
        core = stack.enter_context(_open_core(launched)) if core_context is None else core_context
        sync = TensorboardSync(core, distributed.rank, distributed.local_rank, get_rank_aware_path)
        yield ClusterPlatform(core, facts, distributed, show, claim, sync, Path.cwd())
        sync.close()


def _open_core(launched: bool) -> Any:
    """A core.Context in the modes that this package expects: rank 0 asks about preemption, TensorBoard files are ours."""
    import determined
    from determined import core

    info = determined.get_cluster_info()
    if not launched and info is not None and len(info.container_addrs) * len(info.slot_ids) > 1:
        raise ConfigError(
            "a task of several slots has one process",
            where="entrypoint",
            got=f"{len(info.container_addrs) * len(info.slot_ids)} slots",
            fix="Put python3 -m determined.launch.torch_distributed before the command.",
        )
    return core.init(
        distributed=core.DistributedContext.from_torch_distributed() if launched else None,
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    )


def invalid_hp_class() -> type[BaseException] | None:
    """What trials written for Determined raise when hyperparameters cannot be trained; None without Determined."""
    if not installed():
        return None
    import determined

    kind: type[BaseException] = determined.InvalidHP
    return kind


def harness_bases() -> tuple[type, type]:
    """The classes that the harness asks of a trial and of its controller: ``(LegacyTrial, TrialController)``."""
    import determined

    return determined.LegacyTrial, determined.TrialController
