"""Lightning's Trainer with ZeroTrialStrategy beside plain DDP, on the same data from the same
weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "lightning_script.py"
CLIPPED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3}
BF16 = {"precision": "bf16-mixed"}
HOOKED = {
    "hooked": True,
    "buffers": True,
    "trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "stage 0": {"stage": 0},
    "clipped ddp": {"trainer": CLIPPED},
    "clipped 2": {"stage": 2, "trainer": CLIPPED},
    "bf16 ddp": {"trainer": BF16},
    "bf16 1": {"stage": 1, "trainer": BF16},
    "late 3": {"stage": 3, "late": True},
    "whole": {"stage": 3, "same": True},
    "saved": {"stage": 3, "same": True, "steps": 4, "save": "at4.ckpt"},
    "resumed": {"stage": 3, "same": True, "resume": "at4.ckpt"},
    "resumed at 1": {"stage": 1, "same": True, "resume": "at4.ckpt"},
    "no such checkpoint": {"stage": 1, "resume": "none.ckpt"},
    "hooked ddp": HOOKED,
    "hooked 1": {"stage": 1, **HOOKED},
    "hooked 3": {"stage": 3, **HOOKED},
    "clipped by hand ddp": {"manual": True, "clip": 0.1},
    "clipped by hand 1": {"stage": 1, "manual": True, "clip": 0.1},
    "clipped by config 3": {"stage": 3, "manual": True, "config": {"gradient_clipping": 0.1}},
    "again ddp": {"again": "ddp", "steps": 4},
    "again 3": {"stage": 3, "again": "zero_trial_stage_3", "steps": 4},
    "averaged": {"stage": 1, "swa": True},
}


def train(folder: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out = folder / f"out{ranks}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launcher, str(SCRIPT), str(out), str(ranks), json.dumps(cases)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train every case on two ranks, in one pair of processes."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install -e .[libraries]")
    return train(tmp_path_factory.mktemp("two"), 2, CASES)


@pytest.mark.slow
def test_losses_are_those_of_ddp(two: dict[str, Any]) -> None:
    """Also clipped, accumulated, in bf16, built late, with hooks, and clipped by hand or config."""
    for ours, theirs, limit in (
        ("stage 0", "ddp", 2e-6),
        ("late 3", "ddp", 2e-6),
        ("clipped 2", "clipped ddp", 2e-6),
        ("bf16 1", "bf16 ddp", 2e-2),
        ("hooked 1", "hooked ddp", 2e-6),
        ("clipped by hand 1", "clipped by hand ddp", 2e-6),
        ("clipped by config 3", "clipped by hand ddp", 2e-6),
    ):
        assert two[ours]["steps"] == two[theirs]["steps"] == 8
        for kind in ("losses", "val"):
            assert two[ours][kind] == pytest.approx(two[theirs][kind], abs=limit), ours


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_bits(two: dict[str, Any]) -> None:
    whole = two["whole"]["losses"]
    assert len(set(whole)) == 8
    assert two["saved"]["losses"] + two["resumed"]["losses"] == whole
    assert two["resumed at 1"]["losses"] == pytest.approx(whole[4:], abs=1e-6)


@pytest.mark.slow
def test_hooks_see_the_gradients_that_ddp_shows(two: dict[str, Any]) -> None:
    assert len(two["hooked ddp"]["norms"]) == 8
    assert two["hooked 1"]["norms"] == pytest.approx(two["hooked ddp"]["norms"], rel=1e-5)
    assert two["clipped by hand ddp"]["losses"] != pytest.approx(two["ddp"]["losses"], abs=1e-4)


@pytest.mark.slow
def test_another_trainer_goes_on_with_the_module(two: dict[str, Any]) -> None:
    """Chosen by name; the best checkpoint and the last are kept, and the best one is tested."""
    assert len(two["again 3"]["losses"]) == 8
    for kind in ("losses", "val", "test"):
        assert two["again 3"][kind] == pytest.approx(two["again ddp"][kind], abs=2e-6)


@pytest.mark.slow
def test_what_is_refused(two: dict[str, Any]) -> None:
    assert "none.ckpt" in two["no such checkpoint"]["error"]
    assert "gradient_clipping" in two["hooked 3"]["error"]
    assert "StochasticWeightAveraging" in two["averaged"]["error"]
