"""What a master of Determined 0.38.1 answered to experiments, recorded: which it refused, and to
which configuration it completed the others.

``recorded.json.gz`` has some whole experiments with their completed configurations (``bases``),
others as changes of a base with the changes of its completed configuration (``cases``; False where
it was refused, True where it was only validated), and texts with what YAML means there (``texts``).
What that master draws itself is "@" in it: a name, a seed, and the folder of its storage.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from zero_trial.experiment.rules import ClusterDefaults, InvalidExperiment, complete

RECORDED = json.loads(gzip.decompress(Path(__file__).with_name("recorded.json.gz").read_bytes()))
CLUSTER = ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "@STORAGE@"}, name="@")

# What is refused here although that master takes it, with the reason; docs/reference/master.md
# has the same list.
STRICTER = {
    "entrypoint": "an empty command line starts nothing: every trial fails",
    "environment.proxy_ports.proxy_port": "no port has this number",
    "hyperparameters.lr.maxval": "base ** maxval is infinite: storing the trial fails and ends that master",
    "preemption_timeout": "a paused trial is killed before it can save",
    "resources.max_slots": "fewer than one trial needs: it waits forever",
    "resources.shm_size": "a container of a negative size does not start",
    "resources.weight": "a negative share of the slots",
    "searcher.max_time": "nothing is trained, and -1 counts as 2 ** 64 - 1",
    "searcher.max_length": "nothing is trained",
    "searcher.bracket_rungs": "a bracket without rungs: its first report fails",
    "hyperparameters.x": "infinite values, or a grid without points",
    "hyperparameters.global_batch_size": "infinite values, or a grid without points",
}
# What the file alone does not tell: which pools, workspaces and checkpoints there are.
ELSEWHERE = {"resources.resource_pool", "workspace", "project"}
ELSEWHERE |= {"searcher.source_trial_id", "searcher.source_checkpoint_uuid"}


def changed(value: Any, edits: list[Any]) -> Any:
    """``value`` with every edit ``[path, new]``; "@gone" takes a key out."""
    value = copy.deepcopy(value)
    for (*above, last), new in edits:
        section = value
        for step in above:
            section = section[step]
        if new == "@gone":
            del section[last]
        else:
            section[last] = new
    return value


def answer(source: Any) -> Any:
    """The completed configuration, in which the order of labels and what is drawn do not count;
    False where it is refused."""
    try:
        config = complete(source, CLUSTER).config
    except InvalidExperiment:
        return False
    drawn = (source.get("reproducibility") or {}).get("experiment_seed") is None
    return {
        **config,
        "labels": sorted(config["labels"]),
        **({"reproducibility": {"experiment_seed": "@"}} if drawn else {}),
    }


def key(edits: list[Any]) -> str:
    """The dotted key that was written, without the numbers of list items."""
    written = [path for path, new in edits if new != "@gone"]
    return ".".join(step for step in written[0] if isinstance(step, str)) if written else ""


PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_verdicts_and_completed_configurations_are_the_recorded_ones(part: int):
    wrong = []
    for base, edits, outcome in RECORDED["cases"][part::PARTS]:
        config, completed = RECORDED["bases"][base]
        found = answer(changed(config, edits))
        if outcome is False:
            agrees = found is False or key(edits) in ELSEWHERE
        elif outcome is True:
            agrees = bool(found) or key(edits) in STRICTER
        else:
            agrees = found == changed(completed, outcome) or (found is False and key(edits) in STRICTER)
        if not agrees:
            wrong.append((edits, outcome))
    assert wrong == []


@pytest.mark.parametrize("name", STRICTER)
def test_what_is_refused_only_here_is_refused(name: str):
    cases = [(base, edits) for base, edits, outcome in RECORDED["cases"] if outcome is not False and key(edits) == name]
    assert any(answer(changed(RECORDED["bases"][base][0], edits)) is False for base, edits in cases)


def test_bases_are_completed_as_recorded():
    for config, completed in RECORDED["bases"]:
        assert answer(config) == (completed or False)


@pytest.mark.parametrize(("text", "outcome"), RECORDED["texts"])
def test_texts_mean_what_they_mean_there(text: str, outcome: dict[str, Any] | None):
    try:
        config = complete(text, CLUSTER).config
    except InvalidExperiment as error:
        arrives = {"true", "false"} & set(outcome["hyperparameters"]) if outcome else set()
        renamed = any("is read under that name" in message for message in error.messages)
        assert outcome is None or (arrives and renamed), error.messages
    else:
        assert outcome == {name: config[name] for name in ("data", "hyperparameters")}
