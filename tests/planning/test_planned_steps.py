"""The plan of a rank against real ranks that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config, watched_step
from tests.support.memory_plans import memory_plan, planner_of
from tests.support.pool import Pools
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.memory_plan import Figures

NEAR = 0.03  # of the measured bytes


def planned(folder: str, config: dict[str, Any], *, ranks: int = 2) -> Figures:
    return memory_plan(build(folder), config, ranks, batch()).figures


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_copy_of_a_save_in_the_background_counts(device: str) -> None:
    """It has masters and both moments of Adam: of half the model, in the memory of a rank, or in
    its host's."""
    without = memory_plan(build("gpt"), ds_config(2), 2, device=device)
    background = ds_config(2) | {"checkpoint": {"writer": {"decoupled": True}}}
    plan = memory_plan(build("gpt"), background, 2, device=device)
    more = {name: getattr(plan.figures, name) - getattr(without.figures, name) for name in ("total", "host", "states")}
    copied = pytest.approx(plan.parameter_count * 12 / 2, rel=0.02)
    here, host = (copied, 0) if device == "cpu" else (0, copied)
    assert more == {"states": 0, "total": here, "host": host}
    assert ("copy for checkpoints" in plan.table()) is (device == "cpu")


def case(stage: int, *, bf16: bool = False, accumulation: int = 1, zero: Any = (), **more: Any) -> dict[str, Any]:
    config = ds_config(stage, bf16=bf16, accumulation=accumulation) | more
    config["zero_optimization"] |= dict(zero)
    return config


def on_disk(folder: str, *, state: bool = True, params: bool = False) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    found: dict[str, Any] = {"sub_group_size": 4096}
    found |= {"offload_optimizer": nvme} if state else {}
    return found | ({"offload_param": nvme | {"max_in_cpu": 0, "buffer_size": 4096}} if params else {})


WHOLE = {"Muon": {"type": "Muon", "params": {"lr": 1e-3}}, "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-3}}}
FREED = {"reshard_after": "forward", "stage3_prefetch_bucket_size": 0}
NARROW = {"data_types": {"optimizer_states": "bf16"}}
# Pairwise: stage, precision, accumulation, optimizer, and what is on a disk.
CASES: dict[str, Any] = {
    **{f"ZeRO-{stage} {'bf16' if bf16 else 'fp32'}": lambda _, s=stage, b=bf16: case(s, bf16=b)
       for stage, bf16 in ((0, True), (1, True), (2, False), (3, True), (3, False))},
    **{f"accumulation at ZeRO-{stage}": lambda _, s=stage: case(s, bf16=True, accumulation=2) for stage in (0, 1, 2, 3)},
    **{name: lambda _, n=name: case(2, optimizer={"type": n, "params": {"lr": 1e-3}}) for name in ("Lion", "Lamb")},
    "bf16 states on a disk": lambda disk: case(2, bf16=True, zero=on_disk(disk), **NARROW),
    "state on a disk at ZeRO-3": lambda disk: case(3, bf16=True, zero=on_disk(disk)),
    "parameters on a disk": lambda disk: case(1, bf16=True, zero=on_disk(disk, state=False, params=True)),
    "all on a disk": lambda disk: case(0, bf16=True, zero=on_disk(disk, params=True)),
    "frozen matrices at ZeRO-3": lambda _: case(3, bf16=True, zero=FREED),
    "frozen matrices on a disk at ZeRO-3": lambda disk: case(3, bf16=True, zero=on_disk(disk, params=True) | FREED),
    **{f"norms in fp32 at ZeRO-{stage}": lambda _, s=stage: case(s, bf16=True, data_types={"keep_in_fp32_modules": "norm*"})
       for stage in (0, 2, 3)},
    "norms in fp32, all on a disk": lambda disk: case(
        1, bf16=True, data_types={"keep_in_fp32_modules": "norm*"}, zero=on_disk(disk, params=True)),
    "all on a disk at ZeRO-3": lambda disk: case(3, zero=on_disk(disk, params=True)),
    **{f"{name} at ZeRO-{stage}": lambda _, s=stage, n=name: case(s, bf16=True, optimizer=WHOLE[n])
       for name, stage in (("Muon", 0), ("Muon", 2), ("Adafactor", 3))},
    **{f"{name} on a disk at ZeRO-{stage}": lambda disk, s=stage, n=name: case(s, bf16=True, zero=on_disk(disk), optimizer=WHOLE[n])
       for name, stage in (("Muon", 0), ("Muon", 3), ("Adafactor", 1))},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_real_ranks_need(ranks: Pools, tmp_path: Path, name: str) -> None:
    """What lives through a step to the byte (of whole tensors on rank 0: others own others), the
    peak within NEAR."""
    folder = "bert_mlm" if name in ("ZeRO-0 bf16", "ZeRO-3 bf16") else "gpt"  # with dropout
    folder = "frozen gpt" if name.startswith("frozen") else folder
    config = CASES[name](str(tmp_path))
    figures = planned(folder, config)
    assert figures.total == figures.peak and figures.activations is not None
    for real in ranks(2).run(watched_step, folder, config)[: 1 if name.startswith(tuple(WHOLE)) else None]:
        kept = (real["parameters"], real["gradients"], real["optimizer"])
        assert (figures.parameters, figures.gradients, figures.optimizer) == kept
        assert figures.disk == real["disk"]
        assert figures.peak == pytest.approx(real["peak"], rel=NEAR)
        if "disk" not in name and "accumulation" not in name:
            assert figures.activations == pytest.approx(real["activations"], rel=NEAR)
            # the watcher misses nothing, and little else lives on
            assert sum(kept) <= real["live"] <= 1.02 * sum(kept) + 8192


def test_a_model_in_evaluation_mode_is_planned_in_training_mode() -> None:
    """As from_pretrained returns it: without dropout, and without gradient checkpointing."""
    loaded, trained = (memory_plan(build("bert_mlm").train(mode), ds_config(3), 2, batch()) for mode in (False, True))
    assert loaded.figures == trained.figures


def states_of(config: dict[str, Any], ranks: int = 4) -> tuple[int, int]:
    """Bytes of the states of four layers, and their parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    plan = memory_plan(model, config, ranks)
    return plan.figures.states, plan.parameter_count


@pytest.mark.parametrize(
    ("narrow", "each"),
    [({}, [(16, 0), (4, 12), (2, 14), (0, 16)]), (NARROW, [(12, 0), (4, 8), (2, 10), (0, 12)])],
)
def test_states_alone_are_the_papers_figures(narrow: dict[str, Any], each: list[tuple[int, int]]) -> None:
    """Rajbhandari et al. 2020, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter in
    mixed precision with Adam; with moments of 2 bytes 4 less of what is shared."""
    for stage, (whole, shared) in enumerate(each):
        states, count = states_of(case(stage, bf16=True, zero={"param_persistence_threshold": 0}, **narrow))
        assert states == count * (whole + shared / 4)


class Reads(torch.nn.Module):
    """Reads an integer out of a tensor, which a fake one does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int((x > 0).sum().item())
        return self.inner(x).sum() * count


def test_a_model_that_reads_its_values_gets_real_ones() -> None:
    plan = memory_plan(Reads(), ds_config(1), 2, torch.ones(2, 4))
    assert plan.how == "real tensors" and plan.figures.peak is not None


def test_a_large_batch_takes_no_memory() -> None:
    class Sums(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    large = torch.ones(1, 1).expand(ROWS, 20_000_000)
    plan = memory_plan(Sums(20_000_000, 4, device="meta"), ds_config(1), 2, large)
    assert plan.how == "fake tensors" and plan.figures.peak is not None


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has fake tensors of a GPU")
def test_a_gpu_that_is_not_here() -> None:
    """NCCL receives into no tensor and no segment; between CPU ranks gradients are read where they
    are. The states are the same."""
    on_cpu, on_gpu = (memory_plan(build("gpt"), ds_config(0), 2, batch(), device=device) for device in ("cpu", "cuda"))
    assert on_gpu.how == "fake tensors on the CPU" and on_gpu.figures.states == on_cpu.figures.states
    assert on_gpu.figures.peak == pytest.approx(on_cpu.figures.peak, abs=64)  # a few scalars are the host's


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("folder", "stage", "bf16"),
    [
        ("gpt", 0, False),
        ("gpt", 1, True),
        ("gpt", 2, False),
        ("gpt", 3, True),
        ("bert_mlm", 0, True),
        ("bert_mlm", 3, False),
    ],
)
def test_the_plan_is_what_a_gpu_needs(folder: str, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    figures = memory_plan(build(folder), config, 1, batch(), device="cuda").figures
    real = watched_step(folder, config)
    assert figures.states == pytest.approx(real["parameters"] + real["gradients"] + real["optimizer"], rel=0.02)
    assert figures.peak == pytest.approx(real["peak"], rel=NEAR)


def test_faults_of_a_plan_and_the_random_state() -> None:
    def broken(engine: Any, given: Any) -> torch.Tensor:
        raise ValueError("the user's own fault")

    with pytest.raises(TrialError, match="cannot be run: the user's own fault: got ValueError"):
        memory_plan(Reads(), ds_config(1), 2, torch.ones(2, 4), loss=broken)
    with pytest.raises(ConfigError, match=r"mesh\.shard"):
        planner_of(build("gpt"), ds_config(1, mesh={"shard": 2}), 2).plan(stage=0)
    before = torch.get_rng_state()
    planned("bert_mlm", ds_config(0))
    assert torch.equal(torch.get_rng_state(), before)
