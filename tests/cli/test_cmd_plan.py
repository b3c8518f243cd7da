"""``zero-trial plan``: from an experiment to a table, without ranks."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.planning.project import MODEL, project
from zero_trial.cli import cmd_plan
from zero_trial.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture()
def experiment(tmp_path: Path) -> tuple[str, str]:
    """The quickstart with a small model on few files."""
    shutil.copytree(ROOT / "experiments" / "quickstart", tmp_path / "experiment")
    path = tmp_path / "experiment" / "const.yaml"
    text = path.read_text().replace("source: stdlib", f"source: {ROOT / 'zero_trial' / 'schema'}")
    path.write_text(
        text.replace("sequence: 64", "sequence: 32")
        .replace("layers: 3", "layers: 2")
        .replace("width: 128", "width: 64")
    )
    return str(path), str(ROOT / "model_defs" / "gpt")


def test_the_table(experiment: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *experiment, "--limit", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan    params ") and "(limit 1.0 GiB)  fits" in shown.splitlines()[0]
    assert "per rank: ZeRO-2, fp32, 2 ranks, micro batch 8, accumulation 1" in shown
    for row in (
        "ZeRO-0, micro batch 8",
        "ZeRO-3, micro batch 8",
        "ZeRO-2, micro batch 1 x accumulation 8",
        "micro batch 8 x accumulation 1, state on NVMe",
    ):
        assert row in shown


def test_a_key_that_a_gpu_does_not_honor_is_named_before_the_run(
    experiment: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_optimizer.ratio=0.3"]
    for verb in (["plan", "--limit", "1GiB"], ["check", "--no-build"]):
        assert main([verb[0], *experiment, *words, *verb[1:]]) == 0
        captured = capsys.readouterr()
        shown = captured.err if verb[0] == "plan" else captured.out
        assert "ratio: 0.3 has no effect on a GPU" in shown.replace("\n", " "), verb


def test_the_callers_garbage_collector_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmd_plan, "_plan", lambda options: gc.freeze() or 0)
    gc.unfreeze()
    assert cmd_plan._handle(argparse.Namespace()) == 0
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    gc.disable()
    gc.freeze()
    try:
        cmd_plan._handle(argparse.Namespace())
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.enable()  # and what is frozen stays so, as it is in all tests


def test_what_does_not_fit_ends_with_3_and_the_way_out(
    experiment: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *experiment, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["plan"]["figures"]
    limit = figures["total"] - figures["activations"] // 4
    assert main(["plan", *experiment, "--limit", str(limit)]) == 3
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert (
        captured.err.startswith("error   rank 0 needs ")
        and "Smallest change that fits: micro batch 8→4 with accumulation 1→2" in captured.err
    )


def test_a_limit_of_this_machine_is_the_processes_too(
    experiment: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors alone would fit. A limit that is given is that of a rank's tensors."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("zero_trial.planning.lone_task.own_process", lambda: 160 << 20)
    monkeypatch.setattr("zero_trial.planning.lone_task.rank_limit", lambda device, ranks: 200 << 20)
    assert main(["plan", *experiment, "--slots", "2", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (
        found["plan"]["processes"] == (2 * 160 + 32 + (20 + 70) // 2) << 20
        and found["plan"]["figures"]["total"] < found["limit"]
    )
    assert not found["fits"] and "processes 397.0 MiB" in found["error"]
    assert main(["plan", *experiment, "--slots", "2", "--limit", "200MiB"]) == 0
    assert "processes" not in capsys.readouterr().out


def test_json_slots_and_stage(experiment: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *experiment, "--json", "--slots", "1", "--stage", "0", "--limit", "100"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["plan"]["stage"], found["plan"]["ranks"], found["plan"]["micro_batch"], found["fits"]) == (
        0,
        1,
        16,
        False,
    )
    count = found["plan"]["parameter_count"]
    assert found["plan"]["figures"]["states"] == pytest.approx(
        16 * count, rel=0.01
    )  # fp32: weights, gradients, two moments
    assert found["compared"][-1]["plan"]["figures"]["optimizer"] < found["plan"]["figures"]["optimizer"] / 2
    assert found["error"].startswith("rank 0 needs")


def test_a_machine_that_is_elsewhere(experiment: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 1.6 billion parameters, 6.4 GB in fp32, which are never made here."""
    sizes = [f"hyperparameters.model.{key}" for key in ("layers=2", "width=8192", "heads=32", "sequence=32")]
    words = [*sizes, "hyperparameters.global_batch_size=1024", "gradient_accumulation_steps=1", "bf16.enabled=true"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = main(["plan", *experiment, *words, "--ranks", "1024", "--gpu-memory", "20GiB", "--json"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # KiB
    found = json.loads(capsys.readouterr().out)
    count = found["plan"]["parameter_count"]
    assert code == 0 and found["fits"] and found["limit"] == 20 << 30 and count > 1.6e9
    assert found["plan"]["ranks"] == 1024 and found["plan"]["how"] in ("meta tensors", "fake tensors on the CPU")
    states = [row["plan"]["figures"]["states"] / count for row in found["compared"][:4]]
    shard = 1024
    # masters and moments 12, gradients and parameters 2 bytes each, sharded from stage 1, 2, 3 on
    for stage, expected in enumerate((16, 4 + 12 / shard, 2 + 14 / shard, 16 / shard)):
        assert states[stage] == pytest.approx(expected, rel=0.02)  # small parameters stay whole at stage 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit", "much"], "--memory: not a size"),
        (["--slots", "3"], "train_batch_size"),
    ],
)
def test_user_errors(
    experiment: tuple[str, str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *experiment, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_pipeline_has_a_row_per_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "experiments" / "gpt_pipeline_zero3", tmp_path / "experiment")
    path = tmp_path / "experiment" / "const.yaml"
    text = path.read_text().replace("source: stdlib", f"source: {ROOT / 'zero_trial' / 'schema'}")
    path.write_text(
        text.replace("sequence: 128", "sequence: 32")
        .replace("layers: 4", "layers: 2")
        .replace("width: 128", "width: 32")
    )
    assert main(["plan", str(path), str(ROOT / "model_defs" / "gpt"), "--limit", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert main(["plan", str(path), str(ROOT / "model_defs" / "gpt"), "--limit", "100KiB", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert "per rank: ZeRO-3, fp32, 2 stages x 2 ranks, micro batch 4, accumulation 4" in shown
    assert "looped_bfs, 2 stages x 2 chunks, 4 micro-batches, bubble 11.1%; ZeRO-3, parameters chunk" in shown
    assert "ZeRO-3, micro batch 4 x accumulation 4 (as configured)" in shown
    assert [stage["rank"] for stage in found["plan"]["stages"]] == [0, 1] and not found["fits"]
    assert found["error"].startswith("pipeline stage ")


OWN_ENGINE = """engine, _, self.loader, _ = zero_trial.initialize(
            None, torch.nn.Linear(4, 1), None, None, [torch.ones(4)] * 40, config=context.get_data_config()["ds_config"]
        )
        self.engine = context.wrap_model_engine(engine)"""


def test_a_trial_that_calls_initialize_itself_is_planned_like_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in code for DeepSpeed, with the loader of its four results; no process group is made."""
    engine = 'self.engine = context.initialize(model=torch.nn.Linear(context.get_hparam("width"), 1))'
    loader = "DataLoader([torch.ones(4)] * 40, self.context.get_train_micro_batch_size_per_gpu())"
    assert engine in MODEL and loader in MODEL
    own = MODEL.replace(engine, OWN_ENGINE).replace("import torch\n", "import torch\nimport zero_trial\n")
    disabled = "self.context = context\n        context.disable_dataset_reproducibility_checks()"
    own = own.replace(loader, "self.loader", 1).replace("self.context = context", disabled)
    plans = []
    for name, model in (("given", MODEL), ("own", own)):
        made = project(tmp_path / name, model=model)
        assert main(["plan", str(made.experiment), str(made.folder), "--limit", "1GiB", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] and plans[0]["plan"]["parameter_count"] == 5
    assert not dist.is_initialized() and "model_def" not in sys.modules


def test_a_mistake_in_the_trial_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = MODEL.replace("self.context = context", "self.context = context; context.hparams.depth", 1)
    made = project(tmp_path, model=broken)
    assert main(["plan", str(made.experiment), str(made.folder)]) == 1
    shown = capsys.readouterr().err
    assert "model_def.py:" in shown and "AttributeError" in shown and "Traceback" not in shown


def test_a_trial_may_ask_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asks = "assert self.context.is_epoch_start() and self.context.current_train_batch() == 0\n        loss = "
    made = project(tmp_path, model=MODEL.replace("loss = ", asks, 1))
    assert main(["plan", str(made.experiment), str(tmp_path)]) == 0
    assert "activations" in capsys.readouterr().out


def test_data_code_reads_values_where_a_gpu_is_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the constructor, and of a batch that was moved to the engine's device."""
    model = MODEL.replace("self.context = context", "self.context = context; self.two = int(torch.ones(2).sum())", 1)
    moved = "x = self.context.to_device(next(dataloader_iter))\n        loss = self.engine(x[: int((x[:, 0] > 0).sum())]).mean()"
    made = project(tmp_path, model=model.replace("loss = self.engine(next(dataloader_iter)).mean()", moved, 1))
    assert main(["plan", str(made.experiment), str(made.folder), "--gpu-memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["how"] == "real tensors"


@pytest.mark.parametrize("words", [(), ("--gpu-memory", "1GiB")], ids=["here", "elsewhere"])
def test_layers_of_a_pipeline_may_be_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    given = 'model=torch.nn.Linear(context.get_hparam("width"), 1)'
    layers = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))"
    loss = "loss_fn=torch.nn.functional.mse_loss"
    model = MODEL.replace(given, f"model=PipelineModule.from_sequential({layers}, 2, {loss})")
    model = model.replace("import ZeroTrial", "import PipelineModule, ZeroTrial")
    made = project(tmp_path, model=model.replace("[torch.ones(4)]", "[(torch.ones(4), torch.ones(4))]"))
    assert main(["plan", str(made.experiment), str(made.folder), "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["parameter_count"] == 40
