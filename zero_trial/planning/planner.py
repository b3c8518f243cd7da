"""Plans for one subject at every stage and micro-batch that is asked for, each rehearsed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero_trial.config import DsConfig, read_ds_config
from zero_trial.engine.wiring import mesh_shape, wire
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.plan import MemoryPlan
from zero_trial.planning.rehearsal import MOST_ACCUMULATION, variant
from zero_trial.planning.subject import ModelSubject, Subject

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Choice:
    """One row of a comparison: a plan, or why there is none."""

    name: str
    plan: MemoryPlan | None
    refusal: str = ""


class Planner:
    """``settings`` as the run has them, on ``ranks`` ranks, all on one host or not. Plans are made when asked for, and kept."""

    def __init__(self, subject: Subject, settings: DsConfig, ranks: int, *, one_host: bool = True) -> None:
        self._subject = subject
        self._settings = settings
        self._one_host = one_host
        self.ranks = ranks
        batch = wire(settings, mesh_shape(settings, ranks).data_parallel_size).batch
        self.stage = settings.zero_optimization.stage
        self.micro_batch = batch.micro_batch_size
        self.accumulation = batch.accumulation
        self._known: dict[tuple[int, int], MemoryPlan] = {}

    def plan(self, stage: int | None = None, micro_batch: int | None = None) -> MemoryPlan:
        """The plan at another stage or micro-batch; the global batch stays, so half the micro-batch is twice the accumulation."""
        key = (self.stage if stage is None else stage, self.micro_batch if micro_batch is None else micro_batch)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def halvings(self) -> list[int]:
        """Smaller micro-batches with the same global batch: n/2, n/4, ... as long as they divide."""
        found, size = [], self.micro_batch
        while size % 2 == 0:
            size //= 2
            found.append(size)
        return found

    def compare(self) -> list[Choice]:
        """Every stage at the run's micro-batch, every halving at the run's stage, and offload, which does not exist yet."""
        rows = [self._choice(stage, self.micro_batch) for stage in STAGES]
        rows += [self._choice(self.stage, size) for size in self.halvings()]
        return [*rows, Choice("offload of optimizer state or parameters", None, "not available yet")]

    def _choice(self, stage: int, micro_batch: int) -> Choice:
        here = " (as configured)" if (stage, micro_batch) == (self.stage, self.micro_batch) else ""
        name = f"ZeRO-{stage}, micro batch {micro_batch} x accumulation {self._accumulation(micro_batch)}{here}"
        try:
            return Choice(name, self.plan(stage, micro_batch))
        except (ConfigError, TrialError) as error:
            if here:
                raise
            return Choice(name, None, str(error))

    def _accumulation(self, micro_batch: int) -> int:
        return self.micro_batch * self.accumulation // micro_batch

    def _make(self, stage: int, micro_batch: int) -> MemoryPlan:
        accumulation = self._accumulation(micro_batch)
        rehearsed = min(accumulation, MOST_ACCUMULATION)
        settings = variant(self._settings, stage=stage, micro_batch=micro_batch, accumulation=rehearsed)
        figures, how = self._subject.rehearse(settings, self.ranks, micro_batch, self._one_host)
        precision = "bf16" if settings.bf16.enabled else "fp16" if settings.fp16.enabled else "fp32"
        return MemoryPlan(
            figures, stage, precision, self.ranks, micro_batch, accumulation, self._subject.parameters, how
        )


def memory_plan(
    model: nn.Module, config: DsConfig | Mapping[str, Any] | str | Path, ranks: int, batch: Any = None, **subject: Any
) -> MemoryPlan:
    """What rank 0 of ``ranks`` needs to train ``model`` with ``config`` on micro-batches like ``batch``. No rank is started.

    ``subject``: further arguments of :class:`ModelSubject` (``loss``, ``options``, ``device``). The model is copied without its values and
    stays as it is. A PipelineModule is planned by :class:`zero_trial.planning.PipelinePlanner`.
    """
    settings = config if isinstance(config, DsConfig) else read_ds_config(config)
    return Planner(ModelSubject(model, batch, **subject), settings, ranks).plan()
