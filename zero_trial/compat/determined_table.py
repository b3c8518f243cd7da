"""Maps the names of ``determined.pytorch.deepspeed`` to zero_trial's.

All other modules of ``determined`` are the original package. Its documentation imports some names
from ``determined.pytorch``, so they are added to that module on import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_trial.compat.finder import Refused, StandIn, Table, install
from zero_trial.errors import ConfigError

if TYPE_CHECKING:
    from zero_trial.trial import ZeroTrialContext

MODULE = "determined.pytorch.deepspeed"
OUTER = "determined.pytorch"

TABLE: Table = {
    MODULE: {
        "DeepSpeedTrial": "zero_trial.trial:ZeroTrial",
        "DeepSpeedTrialContext": "zero_trial.trial:ZeroTrialContext",
        "DeepSpeedTrialController": Refused(
            "zero_trial has its own training loop; use Trainer, or name the trial in the experiment's entrypoint."
        ),
        "DeepSpeedMPU": "zero_trial.trial.context:make_engine_mpu",
        "ModelParallelUnit": "zero_trial.trial:ModelParallelUnit",
        "Trainer": "zero_trial:Trainer",
        "init": "zero_trial.compat.determined_table:init",
        "make_data_parallel_mpu": "zero_trial.trial.context:make_data_parallel_mpu",
        "make_deepspeed_mpu": "zero_trial.trial.context:make_engine_mpu",
        "overwrite_deepspeed_config": "zero_trial.ds_config.overlay:overwrite_ds_config",
    }
}
ADDED = ("DeepSpeedMPU", "DeepSpeedTrial", "DeepSpeedTrialContext")


class _AddedNames(MetaPathFinder, Loader):
    """Loads Determined's ``determined.pytorch`` and adds the names in ADDED."""

    def __init__(self) -> None:
        self._genuine: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != OUTER:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._genuine, spec.loader = spec.loader, self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._genuine is None else self._genuine.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._genuine is not None:
            self._genuine.exec_module(module)
        add_names(module)


def add_names(module: ModuleType) -> None:
    """Add the names in ADDED to ``module``, Determined's ``determined.pytorch``."""

    def answer(name: str) -> Any:
        if name in ADDED:
            return getattr(sys.modules.get(MODULE) or __import__(MODULE, fromlist=[name]), name)
        raise AttributeError(f"module {OUTER!r} has no attribute {name!r}")

    vars(module).setdefault("__getattr__", answer)


def install_determined() -> None:
    """Make ``determined.pytorch.deepspeed`` import zero_trial. Raises ConfigError if determined is
    not installed, or if the original module is already imported."""
    if "determined" not in sys.modules and find_spec("determined") is None:
        raise ConfigError(
            "determined is not installed",
            where="zero_trial.as_determined",
            fix="pip install 'zero_trial[determined]': everything but determined.pytorch.deepspeed is used from it.",
        )
    finder = install(StandIn(MODULE, "", TABLE, replace=True))
    finder.refuse_if_installed()
    if OUTER in sys.modules:
        add_names(sys.modules[OUTER])
    elif not any(isinstance(finder, _AddedNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AddedNames())


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: Any = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[ZeroTrialContext]:
    """Collective. Open the trial's context with the arguments of Determined's ``init``.

    ``distributed``: a DistributedContext of Determined. Ranks connect without it; raises
    ConfigError if its number of ranks differs from the launcher's.
    """
    import zero_trial

    with zero_trial.init(
        hparams=hparams, exp_conf=exp_conf, enable_tensorboard_logging=enable_tensorboard_logging
    ) as context:
        size = context.distributed.size
        if distributed is not None and distributed.get_size() != size:
            raise ConfigError(
                "a different number of ranks than were launched",
                where="init(distributed)",
                got=distributed.get_size(),
                expected=size,
                fix="Omit it: the ranks that the launcher has started join automatically.",
            )
        yield context
