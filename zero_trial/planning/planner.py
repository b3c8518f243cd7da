"""The subject of a plan, a comparison of a run's plans at every stage and micro-batch, and the
smallest change that fits.

A pipeline's states are computed from the engine's layouts, and its peak from each rank's row of the
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, Generic

import torch
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.device import is_accelerator
from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.pipeline_build import pipeline_settings, price_line, training_schedule
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.errors import ConfigError, DoesNotFit, TrialError
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.simulator import validate
from zero_trial.planning.memory_plan import Candidate, Figures, MemoryPlan, P, PipelinePlan, StagePlan
from zero_trial.planning.pass_trace import PassTrace, Train, play, trace
from zero_trial.planning.pipeline_parts import ChunkBytes, chunk_bytes, parts_of, play_row, whole_bytes
from zero_trial.planning.state_bytes import PlannedStates, TrainedModel
from zero_trial.util.text import format_bytes, table

Loss = Callable[[Any, Any], torch.Tensor]
MOST_ACCUMULATION = 2  # a third micro-batch of a step needs as much as the second


class Subject:
    """The subject of a plan: engines that train together (several for a GAN), and one call of their
    training.

    Args:
        train: runs a micro-batch, or ``whole_steps``; None: plan only the memory between steps.
        batches: real batches, cut or repeated to the plan's size for ``train``.
    """

    def __init__(
        self,
        engines: Sequence[TrainedModel],
        train: Train | None = None,
        batches: Sequence[Any] = (),
        *,
        whole_steps: bool = False,
    ) -> None:
        self.parameters = sum(engine.blueprint.parameters for engine in engines)
        self.device = engines[0].blueprint.device
        self.samples = rows_of(batches)  # None without a batch
        self._engines = engines
        self._train = train
        self._batches = batches
        self._whole_steps = whole_steps
        self._traces: dict[tuple[Any, ...], PassTrace] = {}

    def figures(self, settings: DsConfig, ranks: int, one_host: bool = True) -> tuple[Figures, str]:
        """Return rank 0's memory with the stage, the offloaded state and the (solved) batch sizes
        of ``settings`` on ``ranks`` ranks, all on one host or not, and the kind of tensors that
        activations were counted on."""
        zero, accumulation = settings.zero_optimization, settings.gradient_accumulation_steps or 1
        micro_batch = settings.train_micro_batch_size_per_gpu or 1
        states = []
        for engine in self._engines:
            own = with_state_at(engine.settings, zero.offload_optimizer)
            own = variant(own, stage=zero.stage, micro_batch=micro_batch, accumulation=accumulation)
            states.append(PlannedStates(engine, own, ranks, self.device))
        found = reduce(add, (each.figures for each in states))
        if self._train is None:
            return found, "none"
        traced = self._trace(self._train, states, micro_batch, accumulation)
        peak = play(traced, states, 1 if self._whole_steps else accumulation, one_host=one_host)
        more = {"activations": traced.activations, "peak": found.states + peak, "host": found.host + traced.host}
        return replace(found, **more), traced.how

    def _trace(self, train: Train, states: Sequence[PlannedStates], micro_batch: int, accumulation: int) -> PassTrace:
        """Return the trace of a micro-batch; traces are cached by everything they depend on."""
        dtypes = repr([(each.resolved.policy, each.resolved.autocast) for each in states])
        key = (micro_batch, dtypes, self._whole_steps and accumulation)
        if key not in self._traces:
            batches = [first_rows(batch, rows_of(batch), micro_batch) for batch in self._batches]
            self._traces[key] = trace(states, train, batches)
        return self._traces[key]


def variant(settings: DsConfig, *, stage: int, micro_batch: int, accumulation: int) -> DsConfig:
    """Return ``settings`` with another ZeRO stage and batch."""
    return replace(
        settings,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        zero_optimization=replace(settings.zero_optimization, stage=stage),
    )


def with_state_at(settings: DsConfig, place: OffloadOptimizerSection | None) -> DsConfig:
    """Return ``settings`` with optimizer state at ``place``."""
    return replace(settings, zero_optimization=replace(settings.zero_optimization, offload_optimizer=place))


def model_subject(model: TrainedModel, batch: Any = None, loss: Loss | None = None) -> Subject:
    """Return the subject of a model alone.

    Args:
        batch: input of its forward (a tuple of arguments, a dict of keyword arguments, or one
            tensor); None: states only.
        loss: ``loss(engine, batch)`` returns the scalar to differentiate; without it, the model is
            called and its own loss is used, or one computed from its outputs.
    """

    def micro(engines: Sequence[Any], batches: Sequence[Any]) -> None:
        engines[0].backward((loss or _call_and_reduce)(engines[0], batches[0]))
        engines[0].step()

    return Subject([model]) if batch is None else Subject([model], micro, [batch])


def _call_and_reduce(engine: Any, batch: Any) -> torch.Tensor:
    """Call the model on ``batch`` and return its loss, or one computed from its outputs."""
    if isinstance(batch, Mapping):
        return loss_in(engine(**batch))
    return loss_in(engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch))


def loss_in(output: Any) -> torch.Tensor:
    """Return the first scalar that requires grad in a model's output: its loss, as in the outputs
    of Hugging Face's models.

    If there is none, the loss is computed outside the model and is unknown. Then use a log-softmax
    over the last dimension of each floating-point output, which needs as much memory as a cross
    entropy.
    """
    floats = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    single = next((leaf for leaf in floats if leaf.numel() == 1), None)
    if single is not None:
        return single.reshape(())
    return torch.stack([torch.log_softmax(leaf.float(), -1).mean() for leaf in floats]).sum()


def _leaves(output: Any) -> list[Any]:
    """Return the leaves of nested outputs; objects with attributes count as dicts."""
    found: list[Any] = []
    for leaf in tree_flatten(output)[0]:
        opens = hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor)
        found += tree_flatten(dict(vars(leaf)))[0] if opens else [leaf]
    return found


def rows_of(batch: Any) -> int | None:
    """Return the samples in a batch: its first tensor's first dimension; None without one."""
    return next(
        (leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )


def first_rows(batch: Any, rows: int | None, wanted: int) -> Any:
    """Cut or repeat the batch's tensors of ``rows`` rows to ``wanted`` samples."""

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or rows == wanted:
            return leaf  # also if rows is None
        if wanted < rows:
            return leaf[:wanted].clone()
        return leaf[torch.arange(wanted) % rows]

    return tree_map(fit, batch)


# --- plans side by side ---

STAGES = (0, 1, 2, 3)
_NVME = OffloadOptimizerSection(device="nvme", nvme_path=(".",))
_HOST = OffloadOptimizerSection(device="cpu")
_WHERE = {"nvme": ", state on NVMe", "cpu": ", state in host memory"}


class RunPlanner(Generic[P]):
    """Plans a run with ``settings`` on ``ranks`` ranks, all on one host or not.

    Plans are made on request, and cached.
    """

    def __init__(
        self,
        settings: DsConfig,
        ranks: int,
        device: torch.device,
        samples: int | None,
        *,
        one_host: bool,
        processes: int,
    ) -> None:
        self.settings = settings
        self.samples = samples  # of a micro-batch from the loader; None without one
        self.ranks = ranks
        self.device = device
        self._one_host = one_host
        self._processes = processes
        self.data_ranks = mesh_shape(settings, ranks).data_parallel_size
        batch = resolve_config(settings, self.data_ranks).batch
        self.stage = settings.zero_optimization.stage
        self.micro_batch = batch.micro_batch_size
        self.accumulation = batch.accumulation
        offload = settings.zero_optimization.offload_optimizer
        # offload state from a GPU to host memory, and from host memory to a disk
        self._elsewhere = _NVME if device.type == "cpu" else _HOST
        self.away = offload is not None and offload.device not in ("none", device.type)
        self._known: dict[tuple[int, int, bool], P] = {}

    def compare(self) -> list[Candidate[P]]:
        """Return the rows of a comparison."""
        raise NotImplementedError

    def _plan_of(self, settings: DsConfig, accumulation: int) -> P:
        raise NotImplementedError

    def plan(self, stage: int | None = None, micro_batch: int | None = None, away: bool | None = None) -> P:
        """Return the plan at another stage or micro-batch with the same global batch: half the
        micro-batch means twice the accumulation.

        ``away``: masters and optimizer state are offloaded from the rank's device.
        """
        stage = self.stage if stage is None else stage
        size = self.micro_batch if micro_batch is None else micro_batch
        key = (stage, size, self.away if away is None else away)
        if key not in self._known:
            accumulation = self._accumulation(size)
            settings = variant(self.settings, stage=stage, micro_batch=size, accumulation=accumulation)
            if away not in (None, self.away):
                settings = with_state_at(settings, self._elsewhere if away else None)
            self._known[key] = self._plan_of(settings, accumulation)
        return self._known[key]

    def halvings(self) -> list[int]:
        """Return smaller micro-batches of the same global batch: n/2, n/4, ... that divide it."""
        found, size = [], self.micro_batch
        while size % 2 == 0:
            size //= 2
            found.append(size)
        return found

    def comparison(self, limit: int | None) -> str:
        """Return :meth:`compare` as a table."""
        heads: list[str] = list(self.plan().cells)
        rows = [["", *heads, ""]]
        for row in self.compare():
            verdict = row.refusal
            if row.plan is not None and limit is not None:
                verdict = "fits" if row.plan.fits(limit) else "does not fit"
            cells: dict[str, str] = row.plan.cells if row.plan is not None else dict.fromkeys(heads, "")
            rows.append([row.name, *cells.values(), verdict])
        return table(rows, right=range(1, len(heads) + 1))

    def does_not_fit(self, limit: int) -> DoesNotFit:
        """Return the error for a plan above ``limit``, with the smallest change that fits."""
        own, found = self.plan(), self.smallest_change(limit)
        parts = [("activations", own.most.activations)] if own.most.activations is not None else []
        parts += [("processes", own.processes)] if own.processes else []
        detail = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        if found is not None:
            fix = f"Smallest change that fits: {describe_change(own, found)}."
        else:
            least = min((row.plan for row in self.compare() if row.plan is not None), key=lambda plan: plan.needs)
            fix = (
                f"No stage and no micro-batch fits; the smallest of those compared is {format_bytes(least.needs)} at ZeRO-{least.stage} with "
                f"micro batch {least.micro_batch}. Use more ranks, a shorter input, activation checkpointing or a smaller model."
            )
        what = f"{own.who} needs {format_bytes(own.needs)}, has {format_bytes(limit)}"
        return DoesNotFit(f"{what} ({detail})" if detail else what, fix=fix)

    def smallest_change(self, limit: int) -> P | None:
        """Return the plan nearest to the run's own that needs at most ``limit`` bytes: the run's
        own if that fits, None if no plan fits.

        The distance is the number of changes: halving the micro-batch, or raising the stage by one.
        On a tie, the plan with the lower stage is nearer, because a halved micro-batch with doubled
        accumulation trains exactly the same.
        """
        sizes = [self.micro_batch, *self.halvings()]
        ways = [(halvings + up, up, size) for halvings, size in enumerate(sizes) for up in range(4 - self.stage)]
        for _, up, size in sorted(ways):
            plan = self._choice(self.stage + up, size).plan
            if plan is not None and plan.fits(limit):
                return plan
        return None

    def _accumulation(self, micro_batch: int) -> int:
        return self.micro_batch * self.accumulation // micro_batch

    def _choice(self, stage: int, micro_batch: int, away: bool | None = None) -> Candidate[P]:
        """Return a row of a comparison. Raises if the run's own settings are rejected."""
        away = self.away if away is None else away
        here = (stage, micro_batch, away) == (self.stage, self.micro_batch, self.away)
        name = f"ZeRO-{stage}, micro batch {micro_batch} x accumulation {self._accumulation(micro_batch)}"
        place = self._elsewhere if away != self.away else self.settings.zero_optimization.offload_optimizer
        name += (_WHERE[place.device] if away and place is not None else "") + (" (as configured)" if here else "")
        try:
            return Candidate(name, self.plan(stage, micro_batch, away))
        except (ConfigError, TrialError) as error:
            if here:
                raise
            return Candidate(name, None, str(error))


def describe_change(own: MemoryPlan | PipelinePlan, other: MemoryPlan | PipelinePlan) -> str:
    """Return ``micro batch 4→2 with accumulation 1→2 (same global batch)``, ``stage 2→3``, both."""
    parts = []
    if other.micro_batch != own.micro_batch:
        parts.append(
            f"micro batch {own.micro_batch}→{other.micro_batch} with accumulation {own.accumulation}→{other.accumulation} (same global batch)"
        )
    if other.stage != own.stage:
        parts.append(f"stage {own.stage}→{other.stage}")
    return " and ".join(parts) or "none"


class Planner(RunPlanner[MemoryPlan]):
    """Plans the memory of ``subject`` on rank 0."""

    def __init__(
        self, subject: Subject, settings: DsConfig, ranks: int, *, one_host: bool = True, processes: int = 0
    ) -> None:
        super().__init__(settings, ranks, subject.device, subject.samples, one_host=one_host, processes=processes)
        self._subject = subject

    def compare(self) -> list[Candidate[MemoryPlan]]:
        """Return every stage at the run's micro-batch, every halving at the run's stage, and the
        run with optimizer state offloaded (GPU to host memory, host to NVMe) or not.
        """
        rows = [self._choice(stage, self.micro_batch) for stage in STAGES]
        rows += [self._choice(self.stage, size) for size in self.halvings()]
        return [*rows, self._choice(self.stage, self.micro_batch, not self.away)]

    def _plan_of(self, settings: DsConfig, accumulation: int) -> MemoryPlan:
        simulated = replace(settings, gradient_accumulation_steps=min(accumulation, MOST_ACCUMULATION))
        figures, how = self._subject.figures(simulated, self.ranks, self._one_host)
        return MemoryPlan(
            figures,
            settings.zero_optimization.stage,
            settings.precision,
            self.ranks,
            settings.train_micro_batch_size_per_gpu or 1,
            accumulation,
            self._subject.parameters,
            how,
            self._processes,
        )


class PipelinePlanner(RunPlanner[PipelinePlan]):
    """Plans each stage of a pipeline; ``batch`` is one micro-batch, (inputs, labels)."""

    def __init__(
        self,
        model: PipelineModule,
        settings: DsConfig,
        ranks: int,
        batch: tuple[Any, Any],
        *,
        device: str = "cpu",
        one_host: bool = True,
        processes: int = 0,
    ) -> None:
        super().__init__(settings, ranks, torch.device(device), rows_of(batch), one_host=one_host, processes=processes)
        self._batch = batch
        self._traced: dict[int, dict[int, ChunkBytes]] = {}
        self._parts = parts_of(model, pipeline_settings(settings), device)

    def compare(self) -> list[Candidate[PipelinePlan]]:
        """Return every ZeRO stage, and twice as many micro-batches of half the size."""
        rows = [self._choice(stage, self.micro_batch) for stage in STAGES]
        return rows + [self._choice(self.stage, size) for size in self.halvings()[:1]]

    def _plan_of(self, settings: DsConfig, accumulation: int) -> PipelinePlan:
        stage, micro_batch = settings.zero_optimization.stage, settings.train_micro_batch_size_per_gpu or 1
        # another stage may not support the run's sharding settings
        if stage != self.stage:
            zero = replace(settings.zero_optimization, reduce_every="auto", reshard_after="auto")
            settings = replace(
                settings, zero_optimization=zero, pipeline=replace(settings.pipeline, zero_policy="auto")
            )
        resolved, pipeline = resolve_config(settings, self.data_ranks), pipeline_settings(settings)
        parts, dtypes = self._parts, resolved.policy
        sharding = Sharding(*resolved.plan.cuts)
        policy = choose(sharding, pipeline.parameters, pipeline.reduction)
        schedule = training_schedule(pipeline, policy, accumulation, parts.ties)
        report = validate(schedule)
        kinds = (
            dtypes.param.itemsize if sharding.parameters else 0,
            dtypes.grad.itemsize if sharding.gradients else 0,
        )
        persistence = settings.zero_optimization.param_persistence_threshold
        if micro_batch not in self._traced:  # a chunk's memory does not depend on the stage
            batch = first_rows(self._batch, self.samples, micro_batch)
            on_host = is_accelerator(self.device) and settings.activation_checkpointing.cpu_checkpointing
            self._traced[micro_batch] = chunk_bytes(parts, batch, dtypes, accumulation, on_host=on_host)
        of_chunk = self._traced[micro_batch]
        chunks = {int(name): chunk for name, chunk in parts.whole.given["model"].named_children()}
        stages = []
        for rank, counted in enumerate(report.ranks):
            mine = {chunk: chunks[chunk] for chunk in parts.placement.of(rank)}
            activations, most, host = play_row(schedule.rows[rank], of_chunk, whole_bytes(mine, *kinds, persistence))
            states = self._states(settings, rank)
            read = sum(of_chunk[chunk].inputs + of_chunk[chunk].labels for chunk in mine) * accumulation
            peak = states.states + most + read + (parts.others[rank] if self.device.type == "cpu" else 0)
            stages.append(
                StagePlan(
                    rank,
                    parts.layers(rank),
                    parts.elements[rank],
                    counted.peak_activations / pipeline.chunks_per_rank,
                    replace(states, activations=activations, peak=peak, host=states.host + host),
                )
            )
        return PipelinePlan(
            tuple(stages),
            stage,
            settings.precision,
            self.data_ranks,
            micro_batch,
            accumulation,
            parts.parameters,
            price_line(pipeline, policy, accumulation, self.data_ranks, stage),
            report.bubble,
            self._processes,
        )

    def _states(self, settings: DsConfig, rank: int) -> Figures:
        """Return the bytes that outlive a step on one rank of a stage."""
        alone = replace(settings, mesh=replace(settings.mesh, pipe=1))
        trained, ranks = TrainedModel(self._parts.stages[rank], alone), self.ranks // settings.mesh.pipe
        return Subject([trained]).figures(alone, ranks, self._one_host)[0]
