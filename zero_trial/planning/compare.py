"""Memory plans side by side at every stage and micro-batch, and the smallest change that fits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.errors import ConfigError, DataError, DoesNotFit, TrialError, ZeroTrialError
from zero_trial.planning.blueprint import ModulesOnMeta
from zero_trial.planning.lone_task import DryRunRequest, TrialEngines, lone_task, raised_by_trial
from zero_trial.planning.memory_plan import (
    Candidate,
    MemoryPlan,
    own_process,
    rank_limit,
    rank_processes,
    side_by_side,
)
from zero_trial.planning.pipeline_plan import PipelinePlanner
from zero_trial.planning.subject import MOST_ACCUMULATION, Subject, variant, with_state_at
from zero_trial.trial.data import TRAIN_LOADER, DataPosition, open_train_data
from zero_trial.trial.settings import TrainPosition
from zero_trial.trial.trial import fitted
from zero_trial.util.text import format_bytes

STAGES = (0, 1, 2, 3)
_NVME = OffloadOptimizerSection(device="nvme", nvme_path=(".",))
_HOST = OffloadOptimizerSection(device="cpu")


class Planner:
    """``settings`` as the run has them, on ``ranks`` ranks, all on one host or not.

    Plans are made when asked for, and kept.
    """

    def __init__(
        self, subject: Subject, settings: DsConfig, ranks: int, *, one_host: bool = True, processes: int = 0
    ) -> None:
        self._subject = subject
        self.settings = settings
        self._one_host = one_host
        self._processes = processes
        self.ranks = ranks
        batch = resolve_config(settings, mesh_shape(settings, ranks).data_parallel_size).batch
        self.stage = settings.zero_optimization.stage
        self.micro_batch = batch.micro_batch_size
        self.accumulation = batch.accumulation
        offload = settings.zero_optimization.offload_optimizer
        # state leaves a GPU for the host's memory, and the host's memory for a disk
        self._elsewhere = _NVME if subject.device.type == "cpu" else _HOST
        self.away = offload is not None and offload.device not in ("none", subject.device.type)
        self.device = subject.device
        self._known: dict[tuple[int, int, bool], MemoryPlan] = {}

    def plan(self, stage: int | None = None, micro_batch: int | None = None, away: bool | None = None) -> MemoryPlan:
        """Return the plan at another stage or micro-batch; the global batch stays, so half the
        micro-batch is twice the accumulation.

        ``away``: with masters and optimizer state elsewhere than the rank's device.
        """
        key = (
            self.stage if stage is None else stage,
            self.micro_batch if micro_batch is None else micro_batch,
            self.away if away is None else away,
        )
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    @property
    def samples(self) -> int | None:
        """Return the samples of a micro-batch as the loader gave it; None without one."""
        return self._subject.samples

    def halvings(self) -> list[int]:
        """Return smaller micro-batches with the same global batch: n/2, n/4, ... as long as they
        divide.
        """
        found, size = [], self.micro_batch
        while size % 2 == 0:
            size //= 2
            found.append(size)
        return found

    def compare(self) -> list[Candidate[MemoryPlan]]:
        """Return every stage at the run's micro-batch, every halving at the run's stage, and the
        run with optimizer state elsewhere: from a GPU in host memory, from there on NVMe; or not.
        """
        rows = [self._choice(stage, self.micro_batch) for stage in STAGES]
        rows += [self._choice(self.stage, size) for size in self.halvings()]
        return [*rows, self._choice(self.stage, self.micro_batch, not self.away)]

    def does_not_fit(self, limit: int) -> DoesNotFit:
        """Return the error for a plan beyond ``limit``: how much it needs, the smallest change that
        fits, and what a stage up would save."""
        own = self.plan()
        figures = own.figures
        parts = [f"activations {format_bytes(figures.activations)}"] if figures.activations is not None else []
        parts += [f"processes {format_bytes(own.processes)}"] if own.processes else []
        detail = f" ({', '.join(parts)})" if parts else ""
        found = smallest_change(self, limit)
        fix = (
            f"Smallest change that fits: {describe_change(own, found)}."
            if found is not None
            else _nothing_fits(self, limit)
        )
        more = _stage_up(self) if found is not None and found.stage == own.stage else ""
        return DoesNotFit(f"rank 0 needs {format_bytes(own.needs)}, has {format_bytes(limit)}{detail}", fix=fix + more)

    def comparison(self, limit: int | None) -> str:
        """Return :meth:`compare` as a table."""

        def cells(plan: MemoryPlan) -> list[str]:
            figures = plan.figures
            sizes = (figures.states, figures.activations, figures.temporary, figures.peak)
            return [format_bytes(size) for size in sizes]

        columns = {"states": 10, "activations": 13, "temporary": 12, "peak": 12}
        return side_by_side(self.compare(), columns, cells, limit)

    def _choice(self, stage: int, micro_batch: int, away: bool | None = None) -> Candidate[MemoryPlan]:
        away = self.away if away is None else away
        here = (stage, micro_batch, away) == (self.stage, self.micro_batch, self.away)
        name = f"ZeRO-{stage}, micro batch {micro_batch} x accumulation {self._accumulation(micro_batch)}"
        place = self._elsewhere if away != self.away else self.settings.zero_optimization.offload_optimizer
        where = {"nvme": ", state on NVMe", "cpu": ", state in host memory"}
        name += (where[place.device] if away and place is not None else "") + (" (as configured)" if here else "")
        try:
            return Candidate(name, self.plan(stage, micro_batch, away))
        except (ConfigError, TrialError) as error:
            if here:
                raise
            return Candidate(name, None, str(error))

    def _accumulation(self, micro_batch: int) -> int:
        return self.micro_batch * self.accumulation // micro_batch

    def _make(self, stage: int, micro_batch: int, away: bool) -> MemoryPlan:
        accumulation = self._accumulation(micro_batch)
        simulated = min(accumulation, MOST_ACCUMULATION)
        settings = variant(self.settings, stage=stage, micro_batch=micro_batch, accumulation=simulated)
        if away != self.away:
            settings = with_state_at(settings, self._elsewhere if away else None)
        figures, how = self._subject.figures(settings, self.ranks, self._one_host)
        return MemoryPlan(
            figures,
            stage,
            settings.precision,
            self.ranks,
            micro_batch,
            accumulation,
            self._subject.parameters,
            how,
            self._processes,
        )


def smallest_change(planner: Planner, limit: int) -> MemoryPlan | None:
    """Return the plan nearest to the run's own that needs at most ``limit`` bytes; the run's own if
    it fits; None if none does.

    Near means few changes: a halving of the micro-batch and a stage up count one each, and of
    equals the one with fewer stages up is nearer, because a halved micro-batch with doubled
    accumulation trains exactly the same.
    """
    micro_batches = [planner.micro_batch, *planner.halvings()]
    candidates = [
        (halvings + stage - planner.stage, stage - planner.stage, stage, size)
        for halvings, size in enumerate(micro_batches)
        for stage in range(planner.stage, 4)
    ]
    for _, _, stage, size in sorted(candidates):
        plan = _plan_or_none(planner, stage, size)
        if plan is not None and plan.fits(limit):
            return plan
    return None


def describe_change(own: MemoryPlan, other: MemoryPlan) -> str:
    """Return ``micro batch 4→2 with accumulation 1→2 (same global batch)``, ``stage 2→3``, both."""
    parts = []
    if other.micro_batch != own.micro_batch:
        parts.append(
            f"micro batch {own.micro_batch}→{other.micro_batch} with accumulation {own.accumulation}→{other.accumulation} (same global batch)"
        )
    if other.stage != own.stage:
        parts.append(f"stage {own.stage}→{other.stage}")
    return " and ".join(parts) or "none"


def _nothing_fits(planner: Planner, limit: int) -> str:
    """Return the advice where no stage and no micro-batch fits."""
    rows = [choice.plan for choice in planner.compare() if choice.plan is not None]
    least = min(rows, key=lambda plan: plan.needs)
    return (
        f"No stage and no micro-batch fits; the least of those compared is {format_bytes(least.needs)} at ZeRO-{least.stage} "
        f"with micro batch {least.micro_batch}. Use more ranks, a shorter input, activation checkpointing or a smaller model."
    )


def _stage_up(planner: Planner) -> str:
    own = planner.plan()
    higher = [
        plan
        for stage in range(own.stage + 1, 4)
        if (plan := _plan_or_none(planner, stage, own.micro_batch)) is not None
    ]
    best = min(higher, key=lambda plan: plan.figures.total, default=None)
    saved = own.figures.total - best.figures.total if best is not None else 0
    return (
        f" Also: stage {own.stage}→{best.stage} saves {format_bytes(saved)}." if best is not None and saved > 0 else ""
    )


def _plan_or_none(planner: Planner, stage: int, micro_batch: int) -> MemoryPlan | None:
    try:
        return planner.plan(stage, micro_batch)
    except (ConfigError, TrialError):
        if (stage, micro_batch) == (planner.stage, planner.micro_batch):
            raise
        return None


# --- the plan of an experiment's trial ---


@dataclass(frozen=True)
class PlannedMachine:
    """What is planned for.

    ``limit``: bytes of one rank, None if unknown; ``asked``: whether it is another machine's or a
    GPU's, so that a pipeline takes the policy that fits in it. (A host's memory is all ranks'
    together: a run on it takes the policy that moves least.) ``elsewhere``: the GPUs are not here,
    nor room for the model. ``sharers``: ranks whose processes share the limit's memory with their
    tensors; 0 where it is of tensors.
    """

    device: str
    limit: int | None
    asked: bool
    one_host: bool
    elsewhere: bool = False
    sharers: int = 0


@contextlib.contextmanager
def trial_planner(
    request: DryRunRequest, machine: PlannedMachine, stage: int | None = None
) -> Iterator[Planner | PipelinePlanner]:
    """Yield the planner of an experiment's trial, which is built here as rank 0, for a machine that
    is elsewhere without values. Raises what the trial raises."""
    ranks, device = request.slots, machine.device
    engines = TrialEngines(ranks, device)
    with lone_task(request, engines.initialize) as task:
        with raised_by_trial(request.model_dir, "building the trial"):
            kind = task.import_class()
            # before the model is: with what the trial's module imports, and without tensors
            processes = rank_processes(own_process(), machine.sharers) if machine.sharers else 0
            context = task.seeded_context()
            with ModulesOnMeta() if machine.elsewhere else contextlib.nullcontext():
                trial = kind(context)
            data = open_train_data(trial, context, DataPosition())
        feed = data.feed
        with raised_by_trial(request.model_dir, f"reading a batch of {TRAIN_LOADER}"):
            first = None if feed is None else next(feed)
        context.set_position(TrainPosition(0, data.epoch_length))
        if engines.pipeline is not None:
            model, settings = engines.pipeline
            batch = _pair(first) if feed is not None else (None, None)
            yield PipelinePlanner(
                model,
                _at_stage(settings, stage),
                ranks,
                batch,
                device=device,
                one_host=machine.one_host,
                processes=processes,
            )
            return
        settings, train = _at_stage(engines.settings, stage), fitted(trial.train_batch)
        subject = engines.subject()
        if feed is not None:
            whole = not context.auto_accumulation
            subject = engines.subject(lambda batches: train(batches, 0, 0), [first], whole_steps=whole)
        yield Planner(subject, settings, ranks, one_host=machine.one_host, processes=processes)


def this_machine(ranks_here: int, *, one_host: bool = True) -> PlannedMachine:
    """Return the machine that we are on, with ``ranks_here`` ranks."""
    of_gpu = torch.cuda.is_available()
    device = "cuda" if of_gpu else "cpu"
    limit = rank_limit(torch.device(device), ranks_here)
    return PlannedMachine(device, limit, of_gpu, one_host, sharers=0 if of_gpu else ranks_here)


def too_large(request: DryRunRequest, parameters: int) -> DoesNotFit | None:
    """Return the error of ``zero-trial plan`` for a trial that does not fit in this machine.

    A trial whose states cannot take half of a rank's memory is not planned: that takes longer than
    a check.
    """
    machine = this_machine(request.slots)
    if machine.limit is None or _STATE_BYTES * parameters < machine.limit // 2:
        return None
    with contextlib.suppress(ZeroTrialError), trial_planner(request, machine) as planner:
        return None if planner.plan().fits(machine.limit) else planner.does_not_fit(machine.limit)
    return None


_STATE_BYTES = 16  # per parameter: fp32 with Adam, not sharded


def _at_stage(settings: DsConfig, stage: int | None) -> DsConfig:
    if stage is None:
        return settings
    return replace(settings, zero_optimization=replace(settings.zero_optimization, stage=stage))


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return a micro-batch of a pipeline: inputs and labels."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        "a pipeline's micro-batch is a pair", where="plan", got=type(batch).__name__, expected="(inputs, labels)"
    )
