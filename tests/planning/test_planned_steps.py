"""The plan of a rank against real ranks that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config, watched_step
from tests.support.memory_plans import memory_plan, planner_of
from tests.support.pool import Pools
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.memory_plan import Figures
from zero_trial.planning.subject import variant

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


def assert_as_measured(figures: Figures, real: dict[str, int]) -> None:
    """What lives through a step to the byte, the peak within NEAR."""
    assert (figures.parameters, figures.gradients, figures.optimizer) == (
        real["parameters"],
        real["gradients"],
        real["optimizer"],
    )
    assert figures.peak == pytest.approx(real["peak"], rel=NEAR)


@pytest.mark.parametrize(
    ("folder", "stage", "bf16"),
    [
        *(("gpt", stage, bf16) for stage in range(4) for bf16 in (False, True)),
        ("bert_mlm", 1, False),
        ("bert_mlm", 3, True),
    ],
)
def test_the_plan_is_what_real_ranks_need(ranks: Pools, folder: str, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    figures = planned(folder, config)
    assert figures.peak is not None and figures.activations is not None
    for real in ranks(2).run(watched_step, folder, config):
        states = real["parameters"] + real["gradients"] + real["optimizer"]
        assert figures.states == pytest.approx(states, rel=0.02)
        assert (figures.parameters, figures.gradients, figures.optimizer) == (
            real["parameters"],
            real["gradients"],
            real["optimizer"],
        )
        assert figures.peak == pytest.approx(real["peak"], rel=NEAR)
        assert figures.activations == pytest.approx(real["activations"], rel=NEAR)
        assert states <= real["live"] <= 1.02 * states + 8192  # the watcher misses nothing, and little else lives on


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_of_bf16_gradients_in_fp32(ranks: Pools, stage: int) -> None:
    config = ds_config(stage, bf16=True, accumulation=2)
    figures = planned("gpt", config)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)


@pytest.mark.parametrize("name", ["Lion", "Adagrad", "SGD", "Lamb"])
def test_every_optimizer_makes_its_own_state(ranks: Pools, name: str) -> None:
    config = ds_config(2) | {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
    figures = planned("gpt", config)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert figures.optimizer == real["optimizer"]
    assert figures.peak == pytest.approx(real["peak"], rel=NEAR)


@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
def test_states_in_bf16(ranks: Pools, tmp_path: Path, nvme: bool) -> None:
    config = ds_config(2, bf16=True) | {"data_types": {"optimizer_states": "bf16"}}
    if nvme:
        offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
        config["zero_optimization"] |= {"offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config)
    assert_as_measured(figures, ranks(2).run(watched_step, "gpt", config)[0])
    wide = planned("gpt", config | {"data_types": {}})
    assert figures.optimizer < wide.optimizer


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (3, True)])
def test_optimizer_state_on_nvme(ranks: Pools, tmp_path: Path, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    config["zero_optimization"] |= {"offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)
    assert figures.optimizer < planned("gpt", ds_config(stage, bf16=bf16)).optimizer


@pytest.mark.parametrize(
    ("stage", "bf16", "state"),
    [(3, False, "nvme"), (3, True, "none"), (0, True, "nvme"), (1, True, "none")],
)
def test_parameters_on_nvme(ranks: Pools, tmp_path: Path, stage: int, bf16: bool, state: str) -> None:
    config = ds_config(stage, bf16=bf16)
    params = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "max_in_cpu": 0, "buffer_size": 4096}
    offload = {"device": state, "nvme_path": str(tmp_path), "buffer_count": 2}
    config["zero_optimization"] |= {"offload_param": params, "offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)
    without = planned("gpt", ds_config(stage, bf16=bf16))
    assert figures.parameters < without.parameters
    assert figures.total == figures.peak


def states_of(config: dict[str, Any], ranks: int = 4) -> tuple[int, int]:
    """Bytes of the states of four layers, and their parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    plan = memory_plan(model, config, ranks)
    return plan.figures.states, plan.parameter_count


def test_states_alone_are_the_papers_figures(caplog: pytest.LogCaptureFixture) -> None:
    """Rajbhandari et al. 2020, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter in
    mixed precision with Adam."""
    for stage, (whole, shared) in enumerate([(16, 0), (4, 12), (2, 14), (0, 16)]):
        zero = {"stage": stage, "param_persistence_threshold": 0}
        states, count = states_of(ds_config(0, bf16=True) | {"zero_optimization": zero})
        assert states == count * (whole + shared / 4)


def test_states_in_fewer_bits_by_the_formula() -> None:
    """Masters of 4 bytes and two moments of 2, cut over the ranks: in place of 12/N."""
    for stage, (whole, shared) in enumerate([(12, 0), (4, 8), (2, 10), (0, 12)]):
        zero = {"stage": stage, "param_persistence_threshold": 0}
        given = {"zero_optimization": zero, "data_types": {"optimizer_states": "bf16"}}
        states, count = states_of(ds_config(0, bf16=True) | given)
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
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("folder", ["gpt", "bert_mlm"])
def test_the_plan_is_what_a_gpu_needs(folder: str, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    figures = memory_plan(build(folder), config, 1, batch(), device="cuda").figures
    real = watched_step(folder, config)
    assert figures.states == pytest.approx(real["parameters"] + real["gradients"] + real["optimizer"], rel=0.02)
    assert figures.peak == pytest.approx(real["peak"], rel=NEAR)


def test_the_users_own_fault_is_named() -> None:
    def broken(engine: Any, given: Any) -> torch.Tensor:
        raise ValueError("the user's own fault")

    with pytest.raises(TrialError, match="cannot be run: the user's own fault: got ValueError"):
        memory_plan(Reads(), ds_config(1), 2, torch.ones(2, 4), loss=broken)


def test_a_config_that_cannot_be_is_refused_as_it_would_be() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.shard"):
        planner_of(build("gpt"), ds_config(1, mesh={"shard": 2}), 2).plan(stage=0)


def test_the_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    planned("bert_mlm", ds_config(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_variant_has_its_stage_and_batch() -> None:
    other = variant(read_ds_config(ds_config(2)), stage=3, micro_batch=2, accumulation=5)
    sizes = (other.zero_optimization.stage, other.train_micro_batch_size_per_gpu, other.gradient_accumulation_steps)
    assert sizes == (3, 2, 5)
