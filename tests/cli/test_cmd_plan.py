"""``zero-trial check``, ``config``, ``plan`` and ``tune``."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, project
from zero_trial.cli import cmd_plan
from zero_trial.cli.main import main
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError, ExitStatus, TrialError
from zero_trial.planning import tune
from zero_trial.planning.tune import (
    ACCUMULATION,
    MICRO,
    STAGE,
    Margin,
    TrainingWay,
    TuneFacts,
    TuneTrial,
    Weighed,
    own_way,
    select,
    ways_to_train,
)

ROOT = Path(__file__).parents[2]


Words = list[str]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def shipped(folder: Path, name: str, **sizes: str) -> Words:
    """Write a shipped experiment with a small model and few files; return what plans it."""
    shutil.copytree(ROOT / "experiments" / name, folder / name)
    path = folder / name / "const.yaml"
    text = path.read_text().replace("source: stdlib", f"source: {ROOT / 'zero_trial' / 'schema'}")
    for key, change in sizes.items():
        before, after = change.split()
        text = text.replace(f"{key}: {before}", f"{key}: {after}")
    path.write_text(text)
    return ["plan", str(path), str(ROOT / "model_defs" / "gpt")]


@pytest.fixture()
def quickstart(tmp_path: Path) -> Words:
    return shipped(tmp_path, "quickstart", sequence="64 32", layers="3 2", width="128 64")


def test_the_table_and_what_does_not_fit(quickstart: Words, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with 3 and the way out."""
    assert main([*quickstart, "--limit", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan    params ") and "(limit 1.0 GiB)  fits" in shown.splitlines()[0]
    assert "per rank: ZeRO-2, fp32, 2 ranks, micro batch 8, accumulation 1" in shown
    for row in ("ZeRO-0, micro batch 8", "ZeRO-3, micro batch 8", "ZeRO-2, micro batch 1 x accumulation 8"):
        assert row in shown
    assert "micro batch 8 x accumulation 1, state on NVMe" in shown
    assert main([*quickstart, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["plan"]["figures"]
    assert main([*quickstart, "--limit", str(figures["total"] - figures["activations"] // 4)]) == 3
    captured = capsys.readouterr()
    assert "does not fit" in captured.out and captured.err.startswith("error   rank 0 needs ")
    assert "Smallest change that fits: micro batch 8→4 with accumulation 1→2" in captured.err
    for words, said in (["--limit", "much"], "--memory: not a size"), (["--slots", "3"], "train_batch_size"):
        assert main([*quickstart, *words]) == 2
        assert said in capsys.readouterr().err


def test_a_key_that_a_gpu_does_not_honor_is_named_before_the_run(
    quickstart: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_optimizer.ratio=0.3"]
    for verb in (["plan", "--limit", "1GiB"], ["check", "--no-build"]):
        assert main([verb[0], *quickstart[1:], *words, *verb[1:]]) == 0
        captured = capsys.readouterr()
        shown = captured.err if verb[0] == "plan" else captured.out
        assert "ratio: 0.3 has no effect on a GPU" in shown.replace("\n", " "), verb


def test_a_limit_of_this_machine_is_the_processes_too(
    quickstart: Words, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors alone would fit. A limit that is given is that of a rank's tensors."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("zero_trial.planning.lone_task.own_process", lambda: 160 << 20)
    monkeypatch.setattr("zero_trial.planning.lone_task.rank_limit", lambda device, ranks: 200 << 20)
    assert main([*quickstart, "--slots", "2", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["processes"] == (2 * 160 + 32 + (20 + 70) // 2) << 20
    assert found["plan"]["figures"]["total"] < found["limit"]
    assert not found["fits"] and "processes 397.0 MiB" in found["error"]
    assert main([*quickstart, "--slots", "2", "--limit", "200MiB"]) == 0
    assert "processes" not in capsys.readouterr().out


def test_json_slots_and_stage(quickstart: Words, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*quickstart, "--json", "--slots", "1", "--stage", "0", "--limit", "100"]) == 3
    found = json.loads(capsys.readouterr().out)
    plan = found["plan"]
    assert (plan["stage"], plan["ranks"], plan["micro_batch"], found["fits"]) == (0, 1, 16, False)
    # fp32: weights, gradients, two moments
    assert plan["figures"]["states"] == pytest.approx(16 * plan["parameter_count"], rel=0.01)
    assert found["compared"][-1]["plan"]["figures"]["optimizer"] < plan["figures"]["optimizer"] / 2
    assert found["error"].startswith("rank 0 needs")


def test_a_machine_that_is_elsewhere(quickstart: Words, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 1.6 billion parameters, 6.4 GB in fp32, which are never made here."""
    sizes = [f"hyperparameters.model.{key}" for key in ("layers=2", "width=8192", "heads=32", "sequence=32")]
    words = [*sizes, "hyperparameters.global_batch_size=1024", "gradient_accumulation_steps=1", "bf16.enabled=true"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = main([*quickstart, *words, "--ranks", "1024", "--gpu-memory", "20GiB", "--json"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # KiB
    found = json.loads(capsys.readouterr().out)
    count = found["plan"]["parameter_count"]
    assert code == 0 and found["fits"] and found["limit"] == 20 << 30 and count > 1.6e9
    assert found["plan"]["ranks"] == 1024 and found["plan"]["how"] in ("meta tensors", "fake tensors on the CPU")
    states = [row["plan"]["figures"]["states"] / count for row in found["compared"][:4]]
    # masters and moments 12, gradients and parameters 2 bytes each, sharded from stage 1, 2, 3 on
    for stage, expected in enumerate((16, 4 + 12 / 1024, 2 + 14 / 1024, 16 / 1024)):
        assert states[stage] == pytest.approx(expected, rel=0.02)  # small parameters stay whole at stage 3


def test_a_pipeline_has_a_row_per_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shipped(tmp_path, "gpt_pipeline_zero3", sequence="128 32", layers="4 2", width="128 32")
    assert main([*words, "--limit", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert "per rank: ZeRO-3, fp32, 2 stages x 2 ranks, micro batch 4, accumulation 4" in shown
    assert "looped_bfs, 2 stages x 2 chunks, 4 micro-batches, bubble 11.1%; ZeRO-3, parameters chunk" in shown
    assert "ZeRO-3, micro batch 4 x accumulation 4 (as configured)" in shown
    assert main([*words, "--limit", "100KiB", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
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


def test_data_code_reads_values_where_a_gpu_is_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the constructor, and of a batch that was moved to the engine's device."""
    model = MODEL.replace("self.context = context", "self.context = context; self.two = int(torch.ones(2).sum())", 1)
    moved = "x = self.context.to_device(next(dataloader_iter))\n        loss = self.engine(x[: int((x[:, 0] > 0).sum())]).mean()"
    made = project(tmp_path, model=model.replace("loss = self.engine(next(dataloader_iter)).mean()", moved, 1))
    assert main(["plan", str(made.experiment), str(made.folder), "--gpu-memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["how"] == "real tensors"


def test_check_and_its_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Faults of the files are 2, of the code 1."""
    made = project(tmp_path / "good")
    assert main(["check", str(made.experiment), str(made.folder), "--slots", "1", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("check   const.yaml ok · model_def:LineTrial ok · ds_config ok")
    assert "reports validation_loss" in captured.out and captured.err == ""
    made = project(tmp_path / "a", ds_config={**DS_CONFIG, "gradient_cliping": 1})
    assert main(["check", str(made.experiment), str(made.folder)]) == 2
    assert "\nerror   ds_config.json:9 gradient_cliping: unknown key." in capsys.readouterr().out
    made = project(tmp_path / "b", model=MODEL.replace("import torch\n", "import torch\nno_such_name\n"))
    assert main(["check", str(made.experiment), str(made.folder)]) == 1
    assert main(["check", str(made.experiment), str(made.folder), "--no-build"]) == 0
    capsys.readouterr()
    made = project(tmp_path / "c", EXPERIMENT.replace("LineTrial", "Other"), model=f"print('hello')\n{MODEL}")
    assert main(["check", str(made.experiment), str(made.folder), "--json"]) == 2
    (issue,) = json.loads(capsys.readouterr().out)["issues"]
    assert (issue["area"], issue["file"], issue["line"]) == ("entrypoint", "const.yaml", 2)


def test_every_value_and_where_it_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {**DS_CONFIG, "zero_optimization": {"round_robin_gradients": True}}
    made = project(tmp_path, ds_config=config)
    assert main(["config", str(made.experiment), str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "train_micro_batch_size_per_gpu 4 derived: 8 // 2 ranks // 1" in lines
    assert "train_batch_size 8 ds_config.json:2" in lines
    assert "gradient_clipping 1.0 default 0.0 before DeepSpeed 0.19.8" in lines
    assert "fp16.enabled false default" in lines
    assert any(
        line.startswith("zero_optimization.round_robin_gradients true ds_config.json:10 no effect: ") for line in lines
    )
    assert main(["config", str(made.experiment), str(tmp_path), "--given"]) == 0
    assert "fp16.enabled" not in capsys.readouterr().out
    assert main(["config", str(made.experiment), str(tmp_path), "--slots", "4", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["value"] for row in body["batch"]}["ranks"] == 4
    assert read_ds_config(body["ds_config"]) == read_ds_config(body["ds_config"] | {"steps_per_print": None})
    assert body["ds_config"]["gradient_clipping"] == 1.0


def test_a_point_of_a_search_and_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experiment = EXPERIMENT.replace("name: single", "name: grid")
    made = project(tmp_path / "a", experiment + "  global_batch_size: {type: categorical, vals: [3, 8]}\n")
    assert main(["config", str(made.experiment), str(made.folder)]) == 0
    assert capsys.readouterr().err == "point   global_batch_size=8\n"
    made = project(tmp_path / "b", ds_config={"train_batch_size": 3})
    assert main(["config", str(made.experiment), str(made.folder)]) == 2
    assert capsys.readouterr().err.startswith("error   train_batch_size 3 ≠")


def test_a_ds_config_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first question of the one who has one: what would be done with it."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "sparse_gradients": True}))
    assert main(["config", str(path), "--slots", "2", "--given"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "gradient_accumulation_steps 4 derived: 32 // 4 // 2 ranks" in lines
    assert any(line.startswith("sparse_gradients true ds_config.json:1 no effect: ") for line in lines)
    path.write_text(json.dumps({"gradient_clipping": 1.0}))
    assert main(["config", str(path), "--slots", "2"]) == 0
    assert "no batch size is set" in capsys.readouterr().out
    path.write_text(json.dumps({"train_batch_size": 32, "zero_optimisation": {}}))
    assert main(["config", str(path)]) == 2
    assert 'Did you mean "zero_optimization"?' in capsys.readouterr().err
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps(sizes))
    assert main(["config", str(path)]) == 0
    assert "data-parallel ranks             4" in capsys.readouterr().out
    assert main(["config", str(path), "--slots", "2"]) == 2
    assert "or start 4 data-parallel ranks" in capsys.readouterr().err
    for verb in ("run", "check", "plan"):  # none takes it for an experiment
        assert main([verb, str(path)]) == 2
        said = "".join(capsys.readouterr())
        assert "this is a ds_config, not an experiment: got train_batch_size, train_micro" in said, verb
        assert "zero-trial config ds_config.json" in said and "unknown key" not in said


def test_auto_stays_in_a_ds_config_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file for Hugging Face's Trainer is filled in by the script, which is not here."""
    path = tmp_path / "ds_config.json"
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    path.write_text(json.dumps(given))
    assert main(["config", str(path), "--given"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    filled = "filled in from args.{0} of a script, or the trial's hyperparameter {0}"
    for key, name in {
        "gradient_clipping": "max_grad_norm",
        "bf16.enabled": "bf16",
        "optimizer.params.lr": "learning_rate",
        "scheduler.params.total_num_steps": "max_steps",
    }.items():
        assert f'{key} "auto" ds_config.json:1 {filled.format(name)}' in lines
    assert any(line.startswith("optimizer.params {eps: 1e-06}") for line in lines)
    assert main(["config", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["ds_config"]
    assert again["gradient_clipping"] == again["bf16"]["enabled"] == "auto"
    assert again["optimizer"]["params"] == {"lr": "auto", "eps": 1e-6}
    with pytest.raises(ConfigError, match='"auto" has no source'):
        read_ds_config(given)
    for section in ("optimizer", "scheduler"):  # whose type no script fills in
        path.write_text(json.dumps({"train_batch_size": 8, section: {"type": "auto"}}))
        assert main(["config", str(path)]) == 2
        assert f'ds_config.json:1 {section}.type: "auto" has no source' in capsys.readouterr().err


def tuned(folder: Path, *options: str, **ds_config: Any) -> tuple[Path, list[str]]:
    """A project whose ds_config has these keys, too, and the words that tune it."""
    made = project(folder)
    made.folder.joinpath("ds_config.json").write_text(json.dumps({**DS_CONFIG, **ds_config}))
    return made.folder, ["tune", str(made.experiment), str(made.folder), "--slots", "1", *options]


def test_dry_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the limits of the section ``autotuning``; what cannot fit is pruned with its planned
    bytes."""
    limits = {"max_train_micro_batch_size_per_gpu": 4, "min_train_micro_batch_size_per_gpu": 2}
    for more, sizes in ({}, [8, 4, 2]), (limits, [4, 2]), ({"num_tuning_micro_batch_sizes": 4}, [8, 4, 2, 1]):
        options = ("--dry-run", "--json", "--keep", "zero_optimization.stage", "--memory", "64GiB")
        _, words = tuned(tmp_path, *options, autotuning=more, train_micro_batch_size_per_gpu=sizes[0])
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["way"]["train_micro_batch_size_per_gpu"] for each in found["fits"]] == sizes
        assert all(each["bytes"] > 0 for each in found["fits"])
        assert found["limit"] == 64 << 30 and (found["pruned"] or more)
    _, words = tuned(tmp_path, "--dry-run", "--memory", "1MiB", "--keep", "zero_optimization.stage")
    assert main(words) == ExitStatus.DOES_NOT_FIT
    captured = capsys.readouterr()
    assert "with the margin, has 1.0 MiB" in captured.out and "has 1.0 MiB" in captured.err
    _, words = tuned(tmp_path, "--gpu-memory", "8GiB", "--keep", "zero_optimization.stage")
    assert main(words) == ExitStatus.USER_ERROR, "GPUs that are elsewhere are planned only"
    assert "--gpu-memory" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert "limit 8.0 GiB per rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "ds_config"),
    [
        (("--keep", "zero_optimisation.stage"), {}),
        (("--trials", "0"), {}),
        ((), {"autotuning": {"tuner_type": "random"}}),
    ],
)
def test_what_is_refused_before_anything_is_planned(
    options: tuple[str, ...], ds_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, words = tuned(tmp_path, "--dry-run", *options, **ds_config)
    assert main(words) == ExitStatus.USER_ERROR
    assert "plan" not in capsys.readouterr().out


def test_ctrl_c_concludes_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[TrainingWay] = []

    def run(request: object, way: TrainingWay, *_: object) -> TuneTrial:
        done.append(way)
        if len(done) == 2:
            raise KeyboardInterrupt
        return TuneTrial(way, 1.0, "", 2.0)

    monkeypatch.setattr(tune, "run_trial", run)
    folder, words = tuned(tmp_path, "--keep", "zero_optimization.stage")
    before = (folder / "ds_config.json").read_text()
    assert main(words) == ExitStatus.INTERRUPTED
    shown = capsys.readouterr().out
    assert (folder / "ds_config.json").read_text() == before
    trains = next(line for line in shown.splitlines() if line.startswith("train "))
    assert trains.endswith(" --slots 1")


def test_a_reason_is_said_once() -> None:
    facts = TuneFacts(samples=8, current={STAGE: 0, MICRO: 8, ACCUMULATION: 1}, keep=(STAGE,))
    why = {8: "", 4: "other samples", 2: "other samples", 1: "too large"}
    found = select(
        ways_to_train(facts),
        lambda way: Weighed(1, refusal=why[way.micro_batch]),
        Margin(0, 0),
        None,
        sizes=3,
        own=own_way(facts),
    )
    pruned = [line for line in cmd_plan._selection_lines(found) if line.startswith("pruned")]
    assert [line.rpartition(": ")[2] for line in pruned] == ["other samples", "too large"]
    assert " and 1 more" in pruned[0] and "more" not in pruned[1]


def test_plans_for_gpus_are_made_in_another_process_which_may_be_killed() -> None:
    for accelerator in (False, True):
        with cmd_plan._planning(accelerator) as call:
            assert (call(os.getpid) != os.getpid()) is accelerator
    with pytest.raises(TrialError, match="was killed"), cmd_plan._planning(True) as call:
        call(os._exit, 1)


@pytest.mark.smoke
def test_two_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--keep", "zero_optimization.stage", "--trials", "2", "--steps", "2", "--json")
    folder, words = tuned(tmp_path, *options)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 2
    assert all(trial["steps_per_second"] > 0 and not trial["why"] for trial in found["trials"])
    assert found["best"]["steps_per_second"] == max(trial["steps_per_second"] for trial in found["trials"])
    assert json.loads((folder / "ds_config.json").read_text()) == DS_CONFIG
    assert not list((tmp_path / "tunes").iterdir())  # measured trials leave no folder
