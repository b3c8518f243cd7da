"""The names of ``deepspeed.runtime.lr_schedules`` other than the schedules (parameter names and
command-line arguments that choose a schedule), and ``deepspeed.runtime.pipe.schedule``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from zero_trial.engine.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULE = "lr_schedule"
_CLASSES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_PARAMETERS = sorted({name for cls in _CLASSES.values() for name in inspect.signature(cls).parameters} - {"optimizer"})

CONSTANTS: dict[str, str] = {
    **{name.upper(): name for name in _PARAMETERS},
    "LR_SCHEDULE": LR_SCHEDULE,
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
    "EDGE_VALUE": "edge_value",
    "MID_VALUE": "mid_value",
}
"""DeepSpeed's names of schedules and of their parameters, by the constant that has them."""


def __getattr__(name: str) -> str:
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Parameters that a script may give on its command line, with DeepSpeed's defaults.
_NUMBERS: dict[str, int | float] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}
_FLAGS = ("lr_range_test_staircase", "cycle_momentum")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule NAME`` and an argument for each parameter of the schedules. Returns the
    parser, as DeepSpeed does. :func:`get_config_from_args` reads the result."""
    group = parser.add_argument_group("schedule", "learning rate schedule by DeepSpeed's names")
    group.add_argument(f"--{LR_SCHEDULE}", default=None, help=", ".join(_CLASSES))
    for name, default in _NUMBERS.items():
        group.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default:g}")
    for name in _FLAGS:
        group.add_argument(f"--{name}", action="store_true")
    group.add_argument("--warmup_type", default="log", help="log or linear")
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the ``scheduler`` section that parsed arguments mean, and None; or None, and why there
    is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in _CLASSES:
        return None, f"{name} is not supported LR schedule"
    given = {key: getattr(args, key, None) for key in inspect.signature(_CLASSES[name]).parameters}
    # a size or count below 0 means that none was given
    params = {
        key: value
        for key, value in given.items()
        if value is not None and not (key.startswith("cycle_") and key.endswith(("_size", "_count")) and value < 0)
    }
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | list[float] | None, str]:
    """Return the learning rate that a ``scheduler`` section sets, and ""; or None, and why there is
    none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name not in _CLASSES:
        return None, f"{name} is not a valid LR schedule"
    if name == "WarmupCosineLR":
        return None, f"{name} scales the optimizer's learning rate, so its params have none"
    rate = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    return config["params"][rate], ""


# --- deepspeed.runtime.pipe.schedule: instructions as data, which the engine does not run ---------


class PipeInstruction:
    """An instruction of a schedule; its arguments are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in the buffer ``buffer_id``."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _buffer_op(name: str) -> type[BufferOpInstruction]:
    return type(name, (BufferOpInstruction,), {})


OptimizerStep, ReduceGrads, ReduceTiedGrads = (
    type(name, (PipeInstruction,), {}) for name in ("OptimizerStep", "ReduceGrads", "ReduceTiedGrads")
)
LoadMicroBatch, ForwardPass, BackwardPass = map(_buffer_op, ("LoadMicroBatch", "ForwardPass", "BackwardPass"))
SendActivation, RecvActivation = map(_buffer_op, ("SendActivation", "RecvActivation"))
SendGrad, RecvGrad = map(_buffer_op, ("SendGrad", "RecvGrad"))


class PipeSchedule:
    """The instructions of stage ``stage_id`` of ``stages``, tick by tick; what a tick sends is
    received in the same tick. Subclasses define :meth:`steps`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = self.num_micro_batches = micro_batches
        self.stages = self.num_stages = stages
        self.stage_id = self.stage = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""
        raise NotImplementedError

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches that are in a stage at one time, at most."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class _Passes(PipeSchedule):
    """A schedule with at most one pass per tick, which :meth:`_at` chooses."""

    def _ticks(self) -> int:
        raise NotImplementedError

    def _at(self, tick: int) -> tuple[bool, int]:
        """Return whether the pass of ``tick`` is a forward pass, and its micro-batch."""
        raise NotImplementedError

    def steps(self) -> Iterator[list[PipeInstruction]]:
        before: Any = None
        for tick in range(self._ticks()):
            forward, number = self._at(tick)
            found: list[PipeInstruction] = []
            now: Any = None
            if 0 <= number < self.micro_batches:
                now = (ForwardPass if forward else BackwardPass)(number % self.num_pipe_buffers())
            if isinstance(now, ForwardPass) and not self.is_first_stage:
                found.append(RecvActivation(now.buffer_id))
            if isinstance(before, ForwardPass) and not self.is_last_stage:
                found.append(SendActivation(before.buffer_id))
            if isinstance(before, BackwardPass) and not self.is_first_stage:
                found.append(SendGrad(before.buffer_id))
            if isinstance(now, BackwardPass) and not self.is_last_stage:
                found.append(RecvGrad(now.buffer_id))
            if isinstance(now, ForwardPass) and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(now.buffer_id))
            yield found + ([now] if now is not None else []) + self._after(tick)
            before = now

    def _after(self, tick: int) -> list[PipeInstruction]:
        return []


class InferenceSchedule(_Passes):
    """Forward passes only: micro-batch m in tick m + stage."""

    def _ticks(self) -> int:
        return self.micro_batches + self.stages - 1

    def num_pipe_buffers(self) -> int:
        return 2

    def _at(self, tick: int) -> tuple[bool, int]:
        return True, tick - self.stage_id


class TrainSchedule(_Passes):
    """1F1B: the forward pass of micro-batch m in tick stage + 2m, its backward pass in tick
    2 stages - stage - 1 + 2m; the optimizer steps at the end."""

    def _ticks(self) -> int:
        return 2 * (self.micro_batches + self.stages - 1)

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _at(self, tick: int) -> tuple[bool, int]:
        ahead = tick - self.stage_id
        return (True, ahead // 2) if ahead % 2 == 0 else (False, (tick + self.stage_id + 1) // 2 - self.stages)

    def _after(self, tick: int) -> list[PipeInstruction]:
        return [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if tick == self._ticks() - 1 else []


class DataParallelSchedule(PipeSchedule):
    """One stage with gradient accumulation."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for number in range(self.micro_batches):
            last = number == self.micro_batches - 1
            yield [
                *(LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)),
                *([ReduceGrads(), OptimizerStep()] if last else []),
            ]
