"""Completed experiments as they were before the readers became one: values, and the keys that are
refused.

``python -m tests.experiment.test_golden`` writes golden.json again, for a change of the format that
is meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_trial.experiment.defaults import ClusterDefaults
from zero_trial.experiment.rules import InvalidExperiment, complete

FILE = Path(__file__).with_name("golden.json")
CLUSTER = ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/storage"}, experiment_seed=11)
PLAIN = complete("name: a\nentrypoint: x\nsearcher: {name: single, metric: loss}\n", CLUSTER).config
CASES: list[dict[str, Any]] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else []


def outcome(text: str) -> dict[str, Any]:
    """What is completed beyond a minimal experiment, or the keys that are refused."""
    try:
        done = complete(text, CLUSTER)
    except InvalidExperiment as error:
        return {"refused": sorted({line.partition(": ")[0] for line in error.messages})}
    changed = {key: value for key, value in done.config.items() if value != PLAIN[key]}
    return {"config": changed, "warnings": done.warnings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: next(iter(case["outcome"])))
def test_an_experiment_is_completed_as_before(case: dict[str, Any]):
    assert outcome(case["yaml"]) == case["outcome"]


def test_both_outcomes_occur():
    refused = sum("refused" in case["outcome"] for case in CASES)
    assert len(CASES) >= 80 and 30 <= refused <= len(CASES) - 30


if __name__ == "__main__":
    found = [{"yaml": case["yaml"], "outcome": outcome(case["yaml"])} for case in CASES]
    FILE.write_text(json.dumps(found, indent=0, ensure_ascii=True) + "\n", "utf-8")
