"""What rank 0 observes of an engine: phases, monitor events, periodic lines, and the state it
starts with.

The engine calls one :class:`Observer` with itself as an argument, so that neither keeps the other
alive. An observer with nothing enabled returns immediately from every call.
"""

from __future__ import annotations

import csv
import gc
import logging
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.comm import Mesh
from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.config_report import render_report
from zero_trial.ds_config.keys_running import CometSection, MlflowSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.profile import BACKWARD, FORWARD, REDUCE_WAIT, STEP, StepProfiler, Timers, make_timers
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import ConfigError, DoesNotFit
from zero_trial.sharding.param_group import ParamGroup, trace_range
from zero_trial.util.failures import add_note, known_fault
from zero_trial.util.text import table

__all__ = ["BACKWARD", "FORWARD", "REDUCE_WAIT", "STEP", "Monitor", "Observer", "build_observer", "trace_range"]

log = logging.getLogger("zero_trial")


# --- monitors -------------------------------------------------------------------------------------


# (name, value, step); the step of the engine's own events is the number of global samples.
Event = tuple[str, float, int]


@dataclass(frozen=True)
class Writer:
    """Writes one event; written events can be read after ``flush``, and none follows ``close``."""

    write: Callable[[str, float, int], object]
    flush: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def require(package: str, section: str) -> None:
    """Raise ConfigError if ``section`` of ds_config needs a ``package`` that is not installed."""
    try:
        found = find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        # a parent is missing, or a mock without a spec is loaded
        found = False
    if not found:
        raise ConfigError(
            f"the package {package} is not installed",
            where=f"{section}.enabled",
            fix=f"Run: pip install {package}; or set {section}.enabled to false.",
        )


# --- writers --------------------------------------------------------------------------------------


def comet_writer(section: CometSection) -> Writer:
    """Return a writer to Comet. It sends an event of a name if at least ``samples_log_interval``
    samples have passed since the last event of that name."""
    options = {
        "api_key": section.api_key,
        "project": section.project,
        "workspace": section.workspace,
        "experiment_key": section.experiment_key,
        "mode": section.mode,
        "online": section.online,
    }
    comet = import_module("comet_ml")
    experiment = comet.start(**{key: value for key, value in options.items() if value is not None})
    if section.experiment_name is not None:
        experiment.set_name(section.experiment_name)
    sent: dict[str, int] = {}

    def write(name: str, value: float, step: int) -> None:
        if name not in sent or step - sent[name] >= section.samples_log_interval:
            sent[name] = step
            experiment.log_metric(name, value, step=step)

    return Writer(write, experiment.flush, experiment.end)


def csv_writer(folder: Path) -> Writer:
    """Return a writer that appends to CSV files in ``folder``, one per name:
    ``Train_Samples_train_loss.csv`` with the columns step and train_loss. A resumed run continues
    the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder could not be created: {error.strerror}", where="csv_monitor.output_path", got=str(folder)
        ) from error

    def write(name: str, value: float, step: int) -> None:
        with (folder / f"{name.replace('/', '_')}.csv").open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, value])

    return Writer(write)


def tensorboard_writer(folder: Path) -> Writer:
    """Return a writer of TensorBoard events in ``folder``: torch's SummaryWriter."""
    board = import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))
    return Writer(board.add_scalar, board.flush, board.close)


def run_writer(package: str, **options: str | None) -> Writer:
    """Return a writer to a run of ``package``, wandb or trackio, started with ``options``."""
    run = import_module(package).init(**options)
    return Writer(lambda name, value, step: run.log({name: value}, step=step), close=run.finish)


def mlflow_writer(section: MlflowSection) -> Writer:
    """Return a writer to a new MLflow run; a run that the script has active stays its own."""
    client = import_module("mlflow").MlflowClient(tracking_uri=section.tracking_uri)
    known = client.get_experiment_by_name(section.experiment_name)
    experiment = known.experiment_id if known is not None else client.create_experiment(section.experiment_name)
    run = client.create_run(experiment, run_name=section.run_name).info.run_id

    def write(name: str, value: float, step: int) -> None:
        client.log_metric(run, name, value, step=step)

    return Writer(write, close=lambda: client.set_terminated(run))


# --- all writers that ds_config switches on -------------------------------------------------------


class Monitor:
    """Passes events to its writers; without any it does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = tuple(writers)

    @property
    def enabled(self) -> bool:
        """Return whether there is a writer."""
        return bool(self._writers)

    def write_events(self, events: Sequence[Event], flush: bool = True) -> None:
        """Write ``events``: (name, value, step). ``Train/Samples/lr`` is a path in the tools."""
        for writer in self._writers:
            for name, value, step in events:
                writer.write(name, float(value), step)
            if flush:
                writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = ()


def build_writers(config: DsConfig, rank: int) -> list[Writer]:
    """Return the writers that ds_config switches on. Every rank checks that the packages are
    installed; only rank 0 opens and writes.

    Raises ConfigError for a package that is not installed or a folder that cannot be created.
    """
    board, files, wandb, track = config.tensorboard, config.csv_monitor, config.wandb, config.trackio
    makers: dict[str, tuple[str, Callable[[], Writer]]] = {
        "tensorboard": (
            "tensorboard",
            lambda: tensorboard_writer(folder_of(board.output_path, "tensorboard", board.job_name)),
        ),
        "csv_monitor": ("csv", lambda: csv_writer(folder_of(files.output_path, "csv_monitor", files.job_name))),
        "wandb": ("wandb", lambda: run_writer("wandb", project=wandb.project, group=wandb.group, entity=wandb.team)),
        "comet": ("comet_ml", lambda: comet_writer(config.comet)),
        "mlflow": ("mlflow", lambda: mlflow_writer(config.mlflow)),
        "trackio": (
            "trackio",
            lambda: run_writer("trackio", project=track.project, name=track.name, space_id=track.space_id),
        ),
    }
    chosen = [name for name in makers if getattr(config, name).enabled]
    for name in chosen:
        require(makers[name][0], name)
    return [makers[name][1]() for name in chosen] if rank == 0 else []


def folder_of(output_path: str, default: str, job_name: str) -> Path:
    """Return ``output_path/job_name``, or ``default/job_name`` in the working directory."""
    return Path(output_path or default).expanduser() / job_name


# Steps between periodic lines where steps_per_print is not set: its default in older DeepSpeed.
DETAILS_EVERY = 10


@dataclass(eq=False)
class Observer:
    """Timers, FLOPs profile, monitor events and periodic lines of one engine; each may be None."""

    monitor: Monitor = field(default_factory=Monitor)
    timers: Timers | None = None
    profiler: StepProfiler | None = None
    events: StepEvents | None = None
    lines: PeriodicLines | None = None
    _resume_collector: Callable[[], object] | None = None

    @contextmanager
    def phase(self, name: str, engine: EngineAccessors) -> Iterator[None]:
        """Measure FORWARD, BACKWARD, REDUCE_WAIT or STEP. A phase that raises is not counted; if
        memory ran out, a table of the largest groups' memory is added to the error."""
        with trace_range(name):
            self.begin(name, engine)
            try:
                yield
            except Exception as error:
                if name != REDUCE_WAIT and isinstance(known_fault(error), DoesNotFit):
                    add_note(error, f"rank {engine.mesh.rank}: {memory_table(engine, most=10)}")
                raise
            self.end(name, engine)

    def begin(self, name: str, engine: EngineAccessors) -> None:
        """Begin a phase; the profiler begins last and ends first, to exclude most overhead."""
        if self.timers is not None:
            self.timers.begin(name)
        if self.profiler is not None:
            self.profiler.begin(name, engine)

    def end(self, name: str, engine: EngineAccessors) -> None:
        """End the current phase."""
        if self.profiler is not None:
            self.profiler.end(name, engine)
        if self.timers is not None:
            self.timers.end(name)

    def after_step(self, engine: EngineAccessors) -> None:
        """Record that an optimizer step is complete, applied or skipped."""
        if self.events is not None:
            self.events.after_step(engine)
        if self.lines is not None:
            self.lines.after_step(engine)

    def pause_collector(self, engine: EngineAccessors) -> None:
        """Disable Python's cycle collector (``disable_python_gc``) until the engine is closed or
        garbage collected. The collector is per process: the first engine that paused it decides."""
        if gc.isenabled():
            gc.disable()
            self._resume_collector = weakref.finalize(engine, gc.enable)

    def close(self) -> None:
        """Write the remaining events, close the monitors, and resume the collector."""
        if self.events is not None:
            self.events.write_evaluation()
        self.monitor.close()
        if self._resume_collector is not None:
            self._resume_collector()


def build_observer(
    config: DsConfig, resolved: ResolvedConfig, module: nn.Module, mesh: Mesh, device: torch.device
) -> Observer:
    """Build what ds_config enables, only on rank 0. Raises ConfigError on every rank for a monitor
    whose package is missing."""
    monitor = Monitor(build_writers(config, mesh.rank))
    if mesh.rank != 0:
        return Observer(monitor)
    events = None
    if monitor.enabled:
        events = StepEvents(monitor, scaled=config.fp16.enabled or resolved.autocast is torch.float16)
    timers = make_timers(device) if config.wall_clock_breakdown else None
    lines = None
    if config.steps_per_print or timers is not None or config.memory_breakdown or config.comms_logger.enabled:
        lines = PeriodicLines(config, device, timers)
    profiler = None
    if config.flops_profiler.enabled:
        dtype = resolved.autocast or resolved.policy.param
        profiler = StepProfiler(module, device, dtype, resolved.batch.micro_batch_size, config.flops_profiler)
    return Observer(monitor, timers=timers, profiler=profiler, events=events, lines=lines)


# --- lines ----------------------------------------------------------------------------------------


class PeriodicLines:
    """Every ``steps_per_print`` steps: progress, timers, memory, communication."""

    def __init__(self, config: DsConfig, device: torch.device, timers: Timers | None) -> None:
        self._config = config
        self._device = device
        self._timers = timers
        self._every = config.steps_per_print or DETAILS_EVERY
        self._steps = self._samples = 0  # since the last lines
        self._time = time.perf_counter()
        self._samples_before: int | None = None

    def after_step(self, engine: EngineAccessors) -> None:
        """Count the step, and log the lines when they are due."""
        before, self._samples_before = self._samples_before, engine.global_samples
        self._samples += engine.global_samples - before if before is not None else engine.train_batch_size()
        self._steps += 1
        if engine.global_steps % self._every:
            return
        throughput = self._config.timers.throughput
        if is_accelerator(self._device) and throughput.enabled and throughput.synchronized:
            torch_module(self._device).synchronize(self._device)
        now = time.perf_counter()
        config, seconds = self._config, now - self._time
        if config.steps_per_print:
            rate = self._samples / seconds if seconds > 0 else None
            log.info("%s", progress_line(engine, rate if throughput.enabled else None, engine.get_mfu(rate or 0.0)))
        if self._timers is not None:
            log.info("%s", timer_line(self._timers, self._steps, seconds))
        if config.memory_breakdown:
            log.info("%s", memory_line(engine, self._device))
        if config.comms_logger.enabled:
            log.info("%s", comms_table(engine.comms_summary()))
        self._steps, self._samples, self._time = 0, 0, now


def progress_line(engine: EngineAccessors, samples_per_second: float | None, mfu: float | None = None) -> str:
    """Return ``step=20 skipped=0 lr=[0.001] grad_norm=1.3 samples/s=512.0 mfu=41.2%``; the rate
    counts the samples of all ranks since the last line."""
    norm = engine.get_global_grad_norm()
    text = f"step={engine.global_steps} skipped={engine.skipped_steps} lr={engine.get_lr()} "
    text += f"grad_norm={norm:.4g}" if norm is not None else "grad_norm=-"
    if samples_per_second is None:
        return text
    return f"{text} samples/s={samples_per_second:.1f}" + (f" mfu={mfu:.1%}" if mfu is not None else "")


def timer_line(timers: Timers, steps: int, seconds: float) -> str:
    """Return ``ms per step: forward 1.20 | backward 2.41 | reduce wait 0.32 | step 0.90 | other
    0.11``; the micro-batches of a step are summed.

    "other" is the host's time outside these phases: data, loss outside the engine, printing.
    """
    sums = {phase: total / steps for phase, total in timers.take().items()}
    sums["other"] = max(seconds * 1e3 / steps - sum(sums.values()), 0.0)
    return "ms per step: " + " | ".join(f"{phase} {value:.2f}" for phase, value in sums.items())


def memory_line(engine: EngineAccessors, device: torch.device) -> str:
    """Return ``memory: parameters 1.2 MiB, gradients ..., optimizer ...; process ... resident at
    most`` (on CUDA: allocated, at most, reserved)."""
    states = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in engine.persistent_bytes().items())
    if is_accelerator(device):
        of = torch_module(device)
        sizes = (of.memory_allocated(device), of.max_memory_allocated(device), of.memory_reserved(device))
        now, most, reserved = (f"{size / 2**20:.1f} MiB" for size in sizes)
        return f"memory: {states}; {device} {now} allocated, {most} peak, {reserved} reserved"
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"memory: {states}; process {peak / 2**20:.1f} MiB peak resident"


def memory_table(engine: EngineAccessors, most: int | None = None) -> str:
    """Return the bytes that each group (or the ``most`` largest) holds on this rank now, largest
    first, below :func:`memory_line`. Memory shared by two tensors counts once. Local."""

    def held(*tensors: torch.Tensor) -> int:
        memory = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(memory.values())

    grads = {id(buffer.group): (buffer.full, buffer.shard) for buffer in engine.sharded.grad_buffers}
    rows = [
        (group.name, group.state.value, held(group.full, group.shard, group.master), held(*grads.get(id(group), ())))
        for group in engine.sharded.groups
    ]
    rows = sorted(rows, key=lambda row: -row[2] - row[3])[:most]
    cells = [(name, state, f"{params / 2**20:,.1f}", f"{grad / 2**20:,.1f}") for name, state, params, grad in rows]
    heads = ("group", "state", "MiB of parameters and masters", "MiB of gradients")
    return "\n".join([memory_line(engine, engine.device), table([heads, *cells], right=(2, 3))])


def comms_table(summary: Mapping[str, Mapping[str, int]]) -> str:
    """Return the collectives since the engine was built, one row per kind and axis: calls, elements
    and bytes that this rank had to send."""
    if not summary:
        return "communication: nothing was sent"
    keys = ("calls", "elements", "bytes")
    rows = [
        ("collective/axis", *keys),
        *((name, *(f"{entry[key]:,}" for key in keys)) for name, entry in summary.items()),
    ]
    return "\n".join(["communication (sent by rank 0):", table(rows, right=(1, 2, 3))])


# --- monitor events -------------------------------------------------------------------------------


class StepEvents:
    """``Train/Samples/{train_loss, lr, loss_scale, eval_loss}`` against global samples.

    ``train_loss`` is this rank's loss averaged over the micro-batches of the step, as in DeepSpeed;
    ``loss_scale`` is written if there is one. ``eval_loss`` is the mean of the scalars that
    ``engine(...)`` returned in eval mode; it is written when training continues, and at the end.
    """

    def __init__(self, monitor: Monitor, *, scaled: bool) -> None:
        self._monitor = monitor
        self._scaled = scaled
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._evaluated: list[torch.Tensor] = []
        self._evaluated_at = 0

    def saw_loss(self, engine: EngineAccessors, loss: torch.Tensor) -> None:
        self.write_evaluation()  # training continues
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._count += 1

    def saw_output(self, engine: EngineAccessors, output: Any) -> None:
        if engine.training:
            self.write_evaluation()
        elif isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
            self.saw_evaluation(engine, output)

    def saw_evaluation(self, engine: EngineAccessors, loss: torch.Tensor) -> None:
        self._evaluated.append(loss.detach().float().reshape(()))
        self._evaluated_at = engine.global_samples

    def after_step(self, engine: EngineAccessors) -> None:
        samples, events = engine.global_samples, []
        if self._sum is not None:
            events.append(("Train/Samples/train_loss", self._sum.item() / self._count, samples))
        if rates := engine.get_lr():
            events.append(("Train/Samples/lr", rates[0], samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, samples))
        self._sum, self._count = None, 0
        self._monitor.write_events(events)

    def write_evaluation(self) -> None:
        """Write the mean of the last evaluation: training continues, or has ended."""
        if self._evaluated:
            mean = torch.stack(self._evaluated).mean().item()
            self._evaluated.clear()
            self._monitor.write_events([("Train/Samples/eval_loss", mean, self._evaluated_at)])


# --- dump_state -----------------------------------------------------------------------------------


def describe_state(config: DsConfig, resolved: ResolvedConfig, mesh: Mesh, groups: Sequence[ParamGroup]) -> str:
    """Describe an engine at start: its complete configuration, mesh and parameter groups."""
    batch, policy = resolved.batch, resolved.policy
    hidden = config.comet.api_key and "(not shown)"
    names = {"parameters": "param", "gradients": "grad", "wire": "comm", "masters": "master", "buffers": "buffer"}
    kinds = {word: str(getattr(policy, name) or "as they are") for word, name in names.items()}
    dtypes = ", ".join(f"{word} {kind.removeprefix('torch.')}" for word, kind in kinds.items())
    return "\n".join(
        [
            "configuration:",
            render_report(replace(config, comet=replace(config.comet, api_key=hidden)), everything=True),
            f"mesh: {mesh.shape}",
            f"batch: {batch.train_batch_size} = {batch.micro_batch_size} x {batch.accumulation} x {mesh.data.size} ranks",
            f"plan: {resolved.plan.describe()}",
            f"dtypes: {dtypes}",
            table([("group", "parameters", "elements", "shard", "dtype", "lives"), *map(_group_row, groups)]),
        ]
    )


def _group_row(group: ParamGroup) -> tuple[str, ...]:
    layout, dtype = group.layout, str(group.dtype).removeprefix("torch.")
    counts = (f"{len(group.params):,}", f"{layout.numel:,}", f"{layout.shard_numel:,}")
    return (group.name, *counts, dtype, group.plan.params.value)
