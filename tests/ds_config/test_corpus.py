"""Every ds_config of the corpus, resolved as before: values with their sources, or the keys that
are refused. And changed at random, read again and again: each is accepted, and then means the same
when it is read again and when it is written out; or refused with faults that name a key.

``python -m tests.ds_config.test_corpus`` writes golden.json again, for a change that is meant.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.ds_config.samples import other_value
from zero_trial.ds_config.batch import reconcile
from zero_trial.ds_config.config_report import config_report, render_report, resolved_ds_config, short_report
from zero_trial.ds_config.key import Support
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import TABLE
from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import read_json

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


FUZZED_HINTS = {"hidden_size": 64, "total_num_steps": 100}

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 10**9, 10**30, 2**63, -0.0, 0.5, 1e-4, 1e400, float("nan"), "", "auto", "AUTO", "1e-4", "5e8",
    "true", "0", "64", "cpu", "fp16", "bf16", "AdamW", "\u0000", "ü" * 40, "x" * 5000, [], {}, [1, 2], [None], [[]], [{}], ["auto"],
    {"enabled": True}, {"enabled": "auto"}, {"": 1}, {"type": "Adam"}, {"params": {}}, {"a": {"b": {"c": 1}}}, {"stage": 3},
]  # fmt: skip
ROWS = [row for row in TABLE.values() if row.support is not Support.REFUSED]
NAMES = sorted({row.name for row in TABLE.values()} | {alias for row in TABLE.values() for alias in row.aliases})


def mutate(config: dict[str, Any], rng: random.Random) -> None:
    """One change somewhere: a value replaced, a key removed, renamed, misspelled, moved, added or
    put into another section."""
    section, key = _pick(config, rng)
    name, junk, change = rng.choice(NAMES), copy.deepcopy(rng.choice(JUNK)), rng.randrange(7)
    if key is None or change == 6:
        section[name] = junk
    elif change <= 1:
        section[key] = junk
    elif change == 2:
        del section[key]
    elif change == 3:
        section[_misspelled(key, rng)] = section.pop(key)
    elif change == 4:
        section[name] = section[key]
    else:
        _pick(config, rng)[0][key] = copy.deepcopy(section[key])


def touch(config: dict[str, Any], rng: random.Random) -> None:
    """One change that may well be legal: a known key at its place under any of its names, with a
    value of its kind, or a key less."""
    section, key = _pick(config, rng)
    if key is not None and rng.random() < 0.3:
        del section[key]
        return
    row = rng.choice(ROWS)
    section = config
    for part in row.path.split(".")[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return
    section[rng.choice([row.name, *row.aliases])] = copy.deepcopy(
        rng.choice([*[other_value(row)] * 5, row.default, "auto"])
    )


def _pick(config: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str | None]:
    """Some key of some section, deeper ones as likely as higher ones."""
    sections = [config]
    for section in sections:
        sections += [value for value in section.values() if isinstance(value, dict)]
    section = rng.choice(sections)
    return section, rng.choice(sorted(section)) if section else None


def _misspelled(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice(
        [word[:at] + word[at + 1 :], word[:at] + rng.choice("aeX_.") + word[at:], word.upper(), f"{word}.x"]
    )


def look_at_ds_config(source: Any) -> bool:
    """Whether it was accepted. Raises what a reader may not raise."""
    hyperparameters = {"lr": 0.1, "global_batch_size": 64}
    try:
        config = read_ds_config(source, hints=FUZZED_HINTS)
        read_ds_config(source, hints=FUZZED_HINTS, hyperparameters=hyperparameters, search=True)
    except ConfigError as error:
        for fault in error.faults or (error,):
            assert fault.where, f"a fault that names no place: {fault}"
            assert len(str(fault)) < 20_000
        return False
    assert read_ds_config(source, hints=FUZZED_HINTS) == config, "reading twice gives two answers"
    written = json.loads(json.dumps(resolved_ds_config(config)))
    assert resolved_ds_config(read_ds_config(written)) == resolved_ds_config(config), (
        "written out it means something else"
    )
    assert render_report(config, everything=True) and short_report(config_report(config))
    try:
        reconcile(config, 4, hyperparameters)
    except ConfigError as error:
        assert str(error)
    return True


def one(seed: int) -> Any:
    """The source of number ``seed``: the same on every machine."""
    rng = random.Random(seed)
    text = rng.choice(CORPUS).read_text("utf-8")
    try:
        config = read_json(text, "corpus").value
    except ConfigError:  # a file of the corpus that is no JSON at all
        config = {}
    gentle = rng.random() < 0.6
    for _ in range(rng.randint(1, 6 if gentle else 3)):
        (touch if gentle else mutate)(config, rng)
    return config if rng.random() < 0.5 else json.dumps(config)


def test_some_hundred_changed_configurations() -> None:
    accepted = 0
    for seed in range(300):
        source = one(seed)
        try:
            accepted += look_at_ds_config(source)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {source!r:.2000}") from error
    assert 15 < accepted < 250, "both answers occur"


if __name__ == "__main__":
    found = {path.stem: outcome(path) for path in CORPUS}
    FILE.write_text(json.dumps(found, indent=0, ensure_ascii=True) + "\n", "utf-8")
