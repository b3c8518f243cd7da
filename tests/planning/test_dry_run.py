"""The dry run of a rank against real ranks that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config, watched_step
from tests.support.memory_plans import memory_plan
from tests.support.pool import Pools
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.dry_run import Role, Way, dry_run, dry_run_any, variant, ways
from zero_trial.planning.memory_plan import Figures


def planned(folder: str, config: dict[str, Any], *, fake: bool, ranks: int = 2) -> Figures:
    role = Role(Blueprint(build(folder)), read_ds_config(config))

    def micro(engines: Any, batches: Any) -> None:
        engines[0].backward(engines[0](*batches[0]))
        engines[0].step()

    return dry_run([role], ranks, micro, [batch()], calls=config["gradient_accumulation_steps"], fake=fake)


def test_traffic_is_that_of_one_step() -> None:
    role, ran = Role(Blueprint(build("gpt")), read_ds_config(ds_config(2, accumulation=2))), []

    def micro(engines: Any, batches: Any) -> None:
        engine = engines[0]
        if not ran:
            engine.mesh.data.broadcast(torch.zeros(4), "in the first step only")
        ran.append(engine)
        engine.backward(engine(*batches[0]))
        engine.step()

    found = dry_run([role], 2, micro, [batch()], calls=2)
    assert "broadcast" not in {each.kind for each in (*found.last, *found.further)}
    assert len(ran) == 4 and found.calls == 2


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
    """What lives through a step to the byte, the peak within a tenth."""
    assert (figures.parameters, figures.gradients, figures.optimizer) == (
        real["parameters"],
        real["gradients"],
        real["optimizer"],
    )
    assert figures.peak == pytest.approx(real["peak"], rel=0.10)


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
    figures = planned(folder, config, fake=True)
    assert figures.peak is not None and figures.activations is not None
    for real in ranks(2).run(watched_step, folder, config):
        states = real["parameters"] + real["gradients"] + real["optimizer"]
        assert figures.states == pytest.approx(states, rel=0.02)
        assert (figures.parameters, figures.gradients, figures.optimizer) == (
            real["parameters"],
            real["gradients"],
            real["optimizer"],
        )
        assert figures.peak == pytest.approx(real["peak"], rel=0.10)
        assert figures.activations == pytest.approx(real["activations"], rel=0.10)
        assert (
            states <= real["live"] - real["rooms"] <= 1.02 * states + 8192
        )  # the watcher misses nothing, and little else lives on


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fake_and_real_tensors_give_one_plan(stage: int) -> None:
    config = ds_config(stage, bf16=True, accumulation=2, gradient_clipping=1.0)
    assert planned("gpt", config, fake=True) == planned("gpt", config, fake=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_of_bf16_gradients_in_fp32(ranks: Pools, stage: int) -> None:
    config = ds_config(stage, bf16=True, accumulation=2)
    figures = planned("gpt", config, fake=True)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)


@pytest.mark.parametrize("name", ["Lion", "Adagrad", "SGD", "Lamb"])
def test_every_optimizer_makes_its_own_state(ranks: Pools, name: str) -> None:
    config = ds_config(2) | {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
    figures = planned("gpt", config, fake=True)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert figures.optimizer == real["optimizer"]
    assert figures.peak == pytest.approx(real["peak"], rel=0.10)


@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
def test_states_in_bf16(ranks: Pools, tmp_path: Path, nvme: bool) -> None:
    config = ds_config(2, bf16=True) | {"data_types": {"optimizer_states": "bf16"}}
    if nvme:
        offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
        config["zero_optimization"] |= {"offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config, fake=True)
    assert_as_measured(figures, ranks(2).run(watched_step, "gpt", config)[0])
    wide = planned("gpt", config | {"data_types": {}}, fake=True)
    assert figures.optimizer < wide.optimizer


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (3, True)])
def test_optimizer_state_on_nvme(ranks: Pools, tmp_path: Path, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    config["zero_optimization"] |= {"offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config, fake=True)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)
    assert figures.optimizer < planned("gpt", ds_config(stage, bf16=bf16), fake=True).optimizer
    assert planned("gpt", config, fake=False).states == figures.states


@pytest.mark.parametrize(
    ("stage", "bf16", "state"),
    [(3, False, "nvme"), (3, True, "none"), (0, True, "nvme"), (1, True, "none")],
)
def test_parameters_on_nvme(ranks: Pools, tmp_path: Path, stage: int, bf16: bool, state: str) -> None:
    config = ds_config(stage, bf16=bf16)
    params = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "max_in_cpu": 0, "buffer_size": 4096}
    offload = {"device": state, "nvme_path": str(tmp_path), "buffer_count": 2}
    config["zero_optimization"] |= {"offload_param": params, "offload_optimizer": offload, "sub_group_size": 4096}
    figures = planned("gpt", config, fake=True)
    real = ranks(2).run(watched_step, "gpt", config)[0]
    assert_as_measured(figures, real)
    without = planned("gpt", ds_config(stage, bf16=bf16), fake=True)
    assert figures.parameters < without.parameters
    assert figures.total == (figures.peak or 0) + figures.exchange


def test_states_alone_are_the_papers_figures(caplog: pytest.LogCaptureFixture) -> None:
    """Rajbhandari et al. 2020, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter in
    mixed precision with Adam."""
    blueprint = Blueprint(torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))))
    for stage, (whole, shared) in enumerate([(16, 0), (4, 12), (2, 14), (0, 16)]):
        zero = {"stage": stage, "param_persistence_threshold": 0}
        role = Role(blueprint, read_ds_config(ds_config(0, bf16=True) | {"zero_optimization": zero}))
        assert dry_run([role], 4, None).states == blueprint.parameters * (whole + shared / 4)
    assert "no gradient has reached" not in caplog.text, "no one expects one"


def test_states_in_bf16_by_the_formula() -> None:
    """Masters of 4 bytes and two moments of 2, cut over the ranks: instead of 12/N."""
    each = 2.0
    blueprint = Blueprint(torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))))
    for stage, (whole, shared) in enumerate(
        [(8 + 2 * each, 0), (4, 4 + 2 * each), (2, 6 + 2 * each), (0, 8 + 2 * each)]
    ):
        zero = {"stage": stage, "param_persistence_threshold": 0}
        given = {"zero_optimization": zero, "data_types": {"optimizer_states": "bf16"}}
        role = Role(blueprint, read_ds_config(ds_config(0, bf16=True) | given))
        assert dry_run([role], 4, None).states == blueprint.parameters * (whole + shared / 4)


class Reads(torch.nn.Module):
    """Reads an integer out of a tensor, which a fake one does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int((x > 0).sum().item())
        return self.inner(x).sum() * count


def micro_of(model: torch.nn.Module, *, broken: bool = False) -> tuple[Role, Any]:
    role = Role(Blueprint(model), read_ds_config(ds_config(1)))

    def micro(engines: Any, batches: Any) -> None:
        if broken:
            raise ValueError("the user's own fault")
        engines[0].backward(engines[0](batches[0]))
        engines[0].step()

    return role, micro


def test_a_model_that_reads_its_values_gets_real_ones() -> None:
    role, micro = micro_of(Reads())
    figures, how = dry_run_any([role], 2, micro, [torch.ones(2, 4)])
    assert how == "real tensors" and figures.peak is not None


def test_small_work_has_real_tensors_and_large_work_fake_ones() -> None:
    class Sums(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    role, micro = micro_of(Sums(4, 4))
    assert dry_run_any([role], 2, micro, [torch.ones(2, 4)])[1] == "real tensors"
    # 20 parameters times 80 M elements, in no memory
    large = torch.ones(1, 1).expand(20_000_000, 4)
    assert dry_run_any([role], 2, micro, [large])[1] == "fake tensors"


def test_the_ways_of_a_dry_run() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert ways(cpu, work=1, scaled=False) == [Way.REAL, Way.FAKE]
    assert ways(cpu, work=1, scaled=True) == ways(cpu, work=10**12, scaled=False) == [Way.FAKE, Way.REAL]
    assert ways(cuda, work=1, scaled=False) == [Way.FAKE, Way.FAKE_ON_CPU, Way.REAL]
    assert ways(cuda, work=1, scaled=False, is_here=False) == [Way.META, Way.FAKE_ON_CPU, Way.REAL]
    # real ones may not fit here
    assert ways(cuda, work=10**12, scaled=False, is_here=False) == [Way.META, Way.FAKE_ON_CPU]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has fake tensors of a GPU")
def test_a_gpu_that_is_not_here_has_meta_tensors() -> None:
    """NCCL receives into no tensor and no segment; between CPU ranks gradients are read where they
    are. The states are the same."""
    on_cpu, on_gpu = (memory_plan(build("gpt"), ds_config(0), 2, batch(), device=device) for device in ("cpu", "cuda"))
    assert on_gpu.how == "meta tensors" and on_gpu.figures.states == on_cpu.figures.states
    assert on_gpu.figures.exchange == 0 == on_cpu.figures.exchange
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
    assert figures.peak == pytest.approx(real["peak"], rel=0.10)


def test_the_users_own_fault_is_named() -> None:
    role, micro = micro_of(Reads(), broken=True)
    with pytest.raises(TrialError, match="cannot be run: the user's own fault: got ValueError"):
        dry_run_any([role], 2, micro, [torch.ones(2, 4)])


def test_a_config_that_cannot_be_is_refused_as_it_would_be() -> None:
    settings = variant(read_ds_config(ds_config(1, mesh={"shard": 2})), stage=0, micro_batch=ROWS, accumulation=1)
    with pytest.raises(ConfigError, match=r"mesh\.shard"):
        dry_run_any([Role(Blueprint(build("gpt")), settings)], 2, None)


def test_the_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    planned("bert_mlm", ds_config(0), fake=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_variant_has_its_stage_and_batch() -> None:
    other = variant(read_ds_config(ds_config(2)), stage=3, micro_batch=2, accumulation=5)
    sizes = (other.zero_optimization.stage, other.train_micro_batch_size_per_gpu, other.gradient_accumulation_steps)
    assert sizes == (3, 2, 5)


def test_a_dry_run_writes_and_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Monitors and timers of the ds_config are those of the run."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    planned("gpt", ds_config(2, steps_per_print=1, wall_clock_breakdown=True, csv_monitor=monitor), fake=False)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
