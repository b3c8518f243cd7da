"""Plans for one subject at every stage and micro-batch that is asked for, each rehearsed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero_trial.config.reader import read_ds_config
from zero_trial.config.sections import DsConfig, OffloadOptimizerSection
from zero_trial.engine.wiring import mesh_shape, wire
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.plan import MemoryPlan
from zero_trial.planning.rehearsal import MOST_ACCUMULATION, variant, with_state_at
from zero_trial.planning.subject import ModelSubject, Subject

STAGES = (0, 1, 2, 3)
_NVME = OffloadOptimizerSection(device="nvme", nvme_path=".")


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
        offload = settings.zero_optimization.offload_optimizer
        self.on_nvme = offload is not None and offload.device == "nvme"
        self._known: dict[tuple[int, int, bool], MemoryPlan] = {}

    def plan(self, stage: int | None = None, micro_batch: int | None = None, on_nvme: bool | None = None) -> MemoryPlan:
        """The plan at another stage or micro-batch; the global batch stays, so half the micro-batch is twice the accumulation.

        ``on_nvme``: with masters and optimizer state on a disk, or in memory.
        """
        key = (
            self.stage if stage is None else stage,
            self.micro_batch if micro_batch is None else micro_batch,
            self.on_nvme if on_nvme is None else on_nvme,
        )
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
        """Every stage at the run's micro-batch, every halving at the run's stage, and the run with optimizer state elsewhere: on NVMe, or not."""
        rows = [self._choice(stage, self.micro_batch) for stage in STAGES]
        rows += [self._choice(self.stage, size) for size in self.halvings()]
        return [*rows, self._choice(self.stage, self.micro_batch, not self.on_nvme)]

    def _choice(self, stage: int, micro_batch: int, on_nvme: bool | None = None) -> Choice:
        on_nvme = self.on_nvme if on_nvme is None else on_nvme
        here = (stage, micro_batch, on_nvme) == (self.stage, self.micro_batch, self.on_nvme)
        name = f"ZeRO-{stage}, micro batch {micro_batch} x accumulation {self._accumulation(micro_batch)}"
        name += (", state on NVMe" if on_nvme else "") + (" (as configured)" if here else "")
        try:
            return Choice(name, self.plan(stage, micro_batch, on_nvme))
        except (ConfigError, TrialError) as error:
            if here:
                raise
            return Choice(name, None, str(error))

    def _accumulation(self, micro_batch: int) -> int:
        return self.micro_batch * self.accumulation // micro_batch

    def _make(self, stage: int, micro_batch: int, on_nvme: bool) -> MemoryPlan:
        accumulation = self._accumulation(micro_batch)
        rehearsed = min(accumulation, MOST_ACCUMULATION)
        settings = variant(self._settings, stage=stage, micro_batch=micro_batch, accumulation=rehearsed)
        if on_nvme != self.on_nvme:
            settings = with_state_at(settings, _NVME if on_nvme else None)
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
