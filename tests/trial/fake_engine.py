"""An engine for tests: the surface of the real one over a plain model and SGD, replicas kept equal
through the injected ranks.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import CheckpointError
from zero_trial.trial.runtime.protocols import Distributed


@dataclass
class FakeGrid:
    """The ``mpu`` of a rank of a mesh: its replica, its place in the pipeline, and its slice."""

    rank: int
    size: int
    pipe: int = 0
    pipes: int = 1
    piece: int = 0

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_world_size(self) -> int:
        return self.size

    def get_pipe_parallel_rank(self) -> int:
        return self.pipe

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipes

    def get_slice_parallel_rank(self) -> int:
        return self.piece


class FakeEngine:
    """Accumulates, averages over the ranks, steps SGD.

    ``skip_steps``: optimizer steps that are skipped, as after an overflow.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: dict[str, Any] | DsConfig,
        ranks: Distributed | None = None,
        skip_steps: tuple[int, ...] = (),
    ) -> None:
        self.module = model
        self.config = config = dict(config.raw if isinstance(config, DsConfig) else config)
        self.ranks = ranks or Distributed()
        self.device = torch.device("cpu")
        self.global_rank, self.world_size, self.dp_world_size = self.ranks.rank, self.ranks.size, self.ranks.size
        self.mpu = FakeGrid(self.ranks.rank, self.ranks.size)
        self.lr = float(config.get("optimizer", {}).get("params", {}).get("lr", 0.1))
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.skip_steps = skip_steps
        self.writing = 0  # further steps for which a checkpoint is written in the background
        self.breaks = False  # its end is an error
        self.optimizer, self.lr_scheduler = None, None

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.gradient_accumulation_steps():
            return
        self.global_steps += 1
        self.writing -= self.writing > 0
        self._finish_writing()
        if self.global_steps in self.skip_steps:
            self.skipped_steps += 1
        else:
            self._update()
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def checkpoint_under_way(self) -> bool:
        return self.writing > 0

    def wait_for_checkpoint(self) -> None:
        self.writing = 0
        self._finish_writing()

    def abandon_checkpoint(self) -> None:
        self.writing = 0

    def _finish_writing(self) -> None:
        if self.breaks and not self.writing:
            raise CheckpointError("a checkpoint could not be written in the background")

    def _update(self) -> None:
        own = [parameter.grad.tolist() for parameter in self.module.parameters() if parameter.grad is not None]
        every = [[torch.tensor(grad) for grad in grads] for grads in self.ranks.allgather(own)]
        with torch.no_grad():
            for parameter, grads in zip(self.module.parameters(), zip(*every, strict=True), strict=True):
                parameter -= self.lr * torch.stack(grads).mean(0)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self.config["train_micro_batch_size_per_gpu"])

    def gradient_accumulation_steps(self) -> int:
        return int(self.config.get("gradient_accumulation_steps", 1))

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def no_sync(self) -> Any:
        return nullcontext()

    def fp16_enabled(self) -> bool:
        return bool(self.config.get("fp16", {}).get("enabled"))

    def skipped_between(self, first: int, end: int) -> int:
        return sum(first < step <= end for step in self.skip_steps)

    def seconds_waited(self) -> float | None:
        return None

    def zero_optimization_stage(self) -> int:
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    def get_mfu(self, samples_per_second: float) -> float | None:
        return None

    def get_lr(self) -> list[float]:
        return [self.lr]

    def get_global_grad_norm(self) -> float | None:
        return None

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Any = None, save_latest: bool = True
    ) -> None:
        folder = Path(save_dir) / str(tag)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "weights": {name: value.tolist() for name, value in self.module.state_dict().items()},
            "counters": [self.global_steps, self.skipped_steps],
            "random": torch.get_rng_state().tolist(),
        }
        (folder / f"rank{self.ranks.rank}.json").write_text(json.dumps(content))

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, load_module_only: bool = False
    ) -> tuple[str | None, Any]:
        folder = Path(load_dir) / str(tag)
        path = folder / f"rank{self.ranks.rank}.json"
        if not path.exists():
            path = folder / "rank0.json"
        if not path.exists():
            return None, {}
        content = json.loads(path.read_text())
        self.module.load_state_dict({name: torch.tensor(value) for name, value in content["weights"].items()})
        if not load_module_only:
            self.global_steps, self.skipped_steps = content["counters"]
            # it may be another than before
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
            torch.set_rng_state(torch.tensor(content["random"], dtype=torch.uint8))
        return str(path), {}


def fake_factory(ranks: Distributed | None = None, skip_steps: tuple[int, ...] = ()) -> Any:
    """An engine factory with the signature of ``zero_trial.initialize``."""

    def initialize(model: torch.nn.Module, config: dict[str, Any], **_: Any) -> tuple[Any, Any, Any, Any]:
        engine = FakeEngine(model, config, ranks, skip_steps)
        return engine, engine.optimizer, None, None

    return initialize
