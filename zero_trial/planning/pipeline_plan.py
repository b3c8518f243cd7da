"""Plan the memory of each pipeline stage: states from the engine's layouts, the peak from its row
of the schedule.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.pipeline_build import pipeline_settings, price_line, training_schedule
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.errors import ConfigError, DoesNotFit, TrialError
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.simulator import validate
from zero_trial.planning.memory_plan import Candidate, Figures, beside_limit, processes_line, side_by_side
from zero_trial.planning.pipeline_parts import Copies, chunk_bytes, copies_of, parts_of, play_row
from zero_trial.planning.state_bytes import TrainedModel
from zero_trial.planning.subject import Subject, first_rows, rows_of, variant
from zero_trial.util.text import format_bytes, format_count


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank: what of the model it has, the most micro-batches whose activations it
    holds, and bytes.
    """

    rank: int
    layers: str
    elements: int
    in_flight: float
    figures: Figures


@dataclass(frozen=True)
class PipelinePlan:
    """All pipeline ranks of one way to train; ``data_ranks`` ranks share each stage."""

    stages: tuple[StagePlan, ...]
    zero_stage: int
    precision: str
    data_ranks: int
    micro_batch: int
    accumulation: int
    parameter_count: int
    price: str  # schedule and policy in a line
    bubble: float = 0.0  # the part of a step in which a rank waits for others, all layers alike
    processes: int = 0  # what a rank's processes take beside tensors, where the limit is theirs, too

    @property
    def largest(self) -> StagePlan:
        """Return the pipeline rank that needs most."""
        return max(self.stages, key=lambda stage: stage.figures.total)

    @property
    def needs(self) -> int:
        """Return what the largest needs, which is compared with a limit."""
        return self.largest.figures.total + self.processes

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.needs <= limit

    def line(self, limit: int | None = None) -> str:
        """Return ``params 0.8M on 2 stages · stage 0 needs most: 9.6 MiB states + 8.0 MiB
        activations, peak 20.1 MiB (limit 5.7 GiB) fits``"""
        most, figures = self.largest, self.largest.figures
        text = (
            f"params {format_count(self.parameter_count)} on {len(self.stages)} stages · stage {most.rank} needs most: "
        )
        text += f"{format_bytes(figures.states)} states + {format_bytes(figures.activations)} activations, peak {format_bytes(figures.peak)}"
        return text + beside_limit(self.processes, limit, self.fits(limit))

    def table(self, limit: int | None = None) -> str:
        """Return a row per pipeline rank; below it the schedule and the policy with their price."""
        head = ("stage", "layers", "parameters", "in flight", "states", "activations", "peak")
        rows = [
            (
                str(stage.rank),
                stage.layers,
                format_count(stage.elements),
                f"{stage.in_flight:.4g}",
                format_bytes(stage.figures.states),
                format_bytes(stage.figures.activations),
                format_bytes(stage.figures.peak)
                + ("" if limit is None or stage.figures.total + self.processes <= limit else "  too much"),
            )
            for stage in self.stages
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        title = (
            f"per rank: ZeRO-{self.zero_stage}, {self.precision}, {len(self.stages)} stages x {self.data_ranks} ranks, "
            f"micro batch {self.micro_batch}, accumulation {self.accumulation}"
        )
        processes = [processes_line(self.processes)] if self.processes else []
        return "\n".join([title, *(f"  {line}" for line in lines), *processes, self.price])

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        stages = [{**asdict(stage), "figures": stage.figures.as_dict()} for stage in self.stages]
        return {**asdict(self), "stages": stages}


class PipelinePlanner:
    """``settings`` as the run has them, on ``ranks`` ranks; ``batch`` is one micro-batch, (inputs,
    labels). Plans are made when asked for.
    """

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
        self.settings = settings
        self._batch = batch
        self._one_host = one_host
        self._processes = processes
        self._on_cpu = device == "cpu"
        place = "cpu" if device == "cuda" and not torch.cuda.is_available() else device
        self._parts = parts_of(model, pipeline_settings(settings), place)
        self.data_ranks = mesh_shape(settings, ranks).data_parallel_size
        self.ranks = ranks
        sizes = resolve_config(settings, self.data_ranks).batch
        self.zero_stage = settings.zero_optimization.stage
        self.micro_batch = sizes.micro_batch_size
        self.accumulation = sizes.accumulation
        self._known: dict[tuple[int, int], PipelinePlan] = {}

    @property
    def samples(self) -> int | None:
        """Return the samples of a micro-batch as the loader gave it; None without one."""
        return rows_of(self._batch)

    def plan(self, zero_stage: int | None = None, micro_batch: int | None = None) -> PipelinePlan:
        """Return the plan at another ZeRO stage or micro-batch; the global batch stays."""
        stage = self.zero_stage if zero_stage is None else zero_stage
        key = (stage, self.micro_batch if micro_batch is None else micro_batch)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def compare(self) -> list[Candidate[PipelinePlan]]:
        """Return every ZeRO stage, and half the micro-batch with twice as many of them, which also
        makes the bubble smaller.
        """
        keys = [(stage, self.micro_batch) for stage in range(4)]
        if self.micro_batch % 2 == 0:
            keys.append((self.zero_stage, self.micro_batch // 2))
        return [self._choice(*key) for key in keys]

    def does_not_fit(self, limit: int) -> DoesNotFit:
        """Return the error for a plan beyond ``limit``, with what of the comparison fits."""
        own = self.plan()
        most = own.largest
        fitting = [row.name for row in self.compare() if row.plan is not None and row.plan.fits(limit)]
        fix = (
            f"This fits: {fitting[0]}."
            if fitting
            else "Nothing compared fits: use more stages, more ranks, or smaller micro-batches."
        )
        what = f"pipeline stage {most.rank} needs {format_bytes(own.needs)}, has {format_bytes(limit)}"
        detail = f"activations {format_bytes(most.figures.activations)}"
        detail += f", processes {format_bytes(own.processes)}" if own.processes else ""
        return DoesNotFit(f"{what} ({detail})", fix=fix)

    def comparison(self, limit: int | None) -> str:
        """Return :meth:`compare` as a table, each row with the pipeline rank that needs most."""

        def cells(plan: PipelinePlan) -> list[str]:
            most = plan.largest
            sizes = (most.figures.states, most.figures.activations, most.figures.peak)
            return [str(most.rank), *(format_bytes(size) for size in sizes)]

        columns = {"stage": 5, "states": 12, "activations": 13, "peak": 12}
        return side_by_side(self.compare(), columns, cells, limit)

    def _choice(self, zero_stage: int, micro_batch: int) -> Candidate[PipelinePlan]:
        own = (zero_stage, micro_batch) == (self.zero_stage, self.micro_batch)
        accumulation = self.micro_batch * self.accumulation // micro_batch
        name = f"ZeRO-{zero_stage}, micro batch {micro_batch} x accumulation {accumulation}{' (as configured)' * own}"
        try:
            return Candidate(name, self.plan(zero_stage, micro_batch))
        except (ConfigError, TrialError) as error:
            if own:
                raise
            return Candidate(name, None, str(error))

    def _make(self, zero_stage: int, micro_batch: int) -> PipelinePlan:
        accumulation = self.micro_batch * self.accumulation // micro_batch
        settings = variant(self.settings, stage=zero_stage, micro_batch=micro_batch, accumulation=accumulation)
        # what was asked of the sharding may be nothing that another stage can do
        if zero_stage != self.zero_stage:
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
        copies = Copies(
            dtypes.param.itemsize if sharding.parameters else 0,
            dtypes.grad.itemsize if sharding.gradients else 0,
            settings.zero_optimization.param_persistence_threshold,
        )
        rows = rows_of(self._batch)
        batch = first_rows(self._batch, rows, micro_batch)
        of_chunk = chunk_bytes(parts, batch, dtypes.param, accumulation)
        chunks = {int(name): chunk for name, chunk in parts.whole.given["model"].named_children()}
        stages = []
        for rank, counted in enumerate(report.ranks):
            mine = {chunk: chunks[chunk] for chunk in parts.placement.of(rank)}
            held = play_row(schedule.rows[rank], of_chunk, copies_of(mine, copies))
            states = self._states(settings, rank)
            read = sum(of_chunk[chunk].inputs + of_chunk[chunk].labels for chunk in mine) * accumulation
            peak = states.states + held.peak + read + (parts.others[rank] if self._on_cpu else 0)
            stages.append(
                StagePlan(
                    rank,
                    parts.layers(rank),
                    parts.elements[rank],
                    counted.peak_activations / pipeline.chunks_per_rank,
                    replace(states, activations=held.activations, peak=peak),
                )
            )
        return PipelinePlan(
            tuple(stages),
            zero_stage,
            settings.precision,
            self.data_ranks,
            micro_batch,
            accumulation,
            parts.parameters,
            price_line(pipeline, policy, accumulation, self.data_ranks, zero_stage),
            report.bubble,
            self._processes,
        )

    def _states(self, settings: DsConfig, rank: int) -> Figures:
        """Return what outlives a step on one rank of a stage: an engine's states over the stage's
        layers, on the stage's own ranks.
        """
        alone = replace(settings, mesh=replace(settings.mesh, pipe=1))
        trained, ranks = TrainedModel(self._parts.stages[rank], alone), self.ranks // settings.mesh.pipe
        return Subject([trained]).figures(alone, ranks, self._one_host)[0]
