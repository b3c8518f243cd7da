"""model_defs/hf_trainer under the embedded master: Trainer with a ds_config, whose metrics and
checkpoints Determined's DetCallback reports."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.master.det import running

ROOT = Path(__file__).parents[3]
# Trainer imports them if they are there, which takes a third of a rank's start.
WITHOUT = 'import sys\nsys.modules.update(dict.fromkeys(("bitsandbytes", "datasets", "pandas", "peft")))\n'


def context(folder: Path) -> Path:
    """Copy model_defs/hf_trainer, for ranks that start quickly."""
    shutil.copytree(ROOT / "model_defs/hf_trainer", folder)
    before, first, after = (folder / "train.py").read_text().partition("from __future__ import annotations\n")
    assert first
    (folder / "train.py").write_text(before + first + WITHOUT + after)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("determined", "transformers", "accelerate")),
    reason="transformers and accelerate are in the extra 'libraries', det in 'determined'",
)
def test_trainer_reports_and_goes_on_at_another_stage(tmp_path: Path) -> None:
    """Another experiment goes on from its checkpoint, at another stage and on two ranks,
    and its adaptive_asha trains the trial through its rungs."""
    config = yaml.safe_load((ROOT / "experiments/hf_trainer/grid.yaml").read_text())
    hparams = config["hyperparameters"]
    hparams["learning_rate"] = 0.01
    hparams["training_arguments"] |= {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "logging_steps": 1}
    config["data"] |= {"max_bytes": 100_000, "validation_windows": 8}
    hparams["ds_config"] = {"zero_optimization": {"stage": 0}}
    config["resources"]["slots_per_trial"] = 1
    file, model_def = tmp_path / "grid.yaml", context(tmp_path / "hf_trainer")
    (tmp_path / "master").mkdir()
    with running(tmp_path / "master") as det:

        def completed(number: int) -> None:
            file.write_text(json.dumps(config))
            det.ok("experiment", "create", str(file), str(model_def))
            assert det.wait(number) == "COMPLETED", det.logs(number)

        completed(1)
        (trial,) = det.trials(1)
        found = det.json("trial", "describe", str(trial["id"]), "--metrics")["workloads"]
        losses = {
            each["validation"]["totalBatches"]: each["validation"]["metrics"]["avgMetrics"]["eval_loss"]
            for each in found
            if each.get("validation")
        }
        assert set(losses) == {2, 4} and losses[4] < losses[2]
        saved = [each["checkpoint"] for each in found if each.get("checkpoint")]
        assert 4 in {each["totalBatches"] for each in saved}
        assert any(name.startswith("checkpoint-4/") for each in saved for name in each["resources"])

        # On two ranks, from the first trial's checkpoint, and through the rungs of adaptive_asha.
        config["resources"]["slots_per_trial"] = 2
        config["searcher"] = {"name": "adaptive_asha", "metric": "eval_loss", "max_time": 6, "time_metric": "batches"}
        config["searcher"] |= {"max_trials": 1, "max_rungs": 2, "divisor": 2, "source_trial_id": 1}
        hparams["ds_config"] = {"zero_optimization": {"stage": 3}}
        hparams["training_arguments"] |= {"max_steps": 6, "per_device_train_batch_size": 4}
        completed(2)
        (trial,) = det.trials(2)
        assert (trial["state"].rpartition("_")[2], trial["totalBatchesProcessed"]) == ("COMPLETED", 6)
        found = det.json("trial", "describe", "2", "--metrics")["workloads"]
        (saved,) = [each["checkpoint"] for each in found if each.get("checkpoint")]
        assert {f"checkpoint-6/rng_state_{rank}.pth" for rank in range(2)} <= saved["resources"].keys()
        log = det.logs(2)
        assert "report_metrics(group=training, steps_completed=5," in log
        assert "report_metrics(group=training, steps_completed=4," not in log
