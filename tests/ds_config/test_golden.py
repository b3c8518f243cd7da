"""Every ds_config of the corpus, resolved as before: values with their sources, or the keys that
are refused.

``python -m tests.ds_config.test_golden`` writes golden.json again, for a change that is meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_trial.ds_config.config_report import config_report
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError

FILE = Path(__file__).with_name("golden.json")
CORPUS = sorted((FILE.parent / "corpus").glob("*.json"))
HINTS: dict[str, Any] = {
    "learning_rate": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.01, "warmup_steps": 10,
    "num_training_steps": 100, "max_grad_norm": 1.0, "fp16": False, "bf16": False, "hidden_size": 64, "per_device_train_batch_size": 2,
}  # fmt: skip
GOLDEN: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}


def outcome(path: Path) -> Any:
    """``{key: [value, source]}`` of what is not a default, or the places of the faults."""
    try:
        config = read_ds_config(path, hints=HINTS)
    except ConfigError as error:
        return sorted(str(fault.where) for fault in error.faults or (error,))
    entries = [entry for entry in config_report(config) if not entry.source.startswith("default")]
    found = {entry.key: [entry.value, entry.source] for entry in entries}
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_ds_config_is_resolved_as_before(path: Path):
    assert outcome(path) == GOLDEN[path.stem]


if __name__ == "__main__":
    found = {path.stem: outcome(path) for path in CORPUS}
    FILE.write_text(json.dumps(found, indent=0, ensure_ascii=True) + "\n", "utf-8")
