"""Determined itself, and nobody else imports it: the task's facts, a core.Context for a trial, the harness's base classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.platform.cluster import ClusterPlatform, Show, TrialFacts
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
    from determined import core
    from determined.tensorboard.util import get_rank_aware_path

    facts = require_facts()
    with ExitStack() as stack:
        if core_context is None:
            ranks = core.DistributedContext.from_torch_distributed() if launched else None
            core_context = stack.enter_context(
                core.init(
                    distributed=ranks,
                    preempt_mode=core.PreemptMode.ChiefOnly,
                    tensorboard_mode=core.TensorboardMode.MANUAL,
                )
            )
        platform = ClusterPlatform(
            core_context, facts, distributed, show, claim, Path.cwd(), mangler=get_rank_aware_path
        )
        yield platform
        platform.close()


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
