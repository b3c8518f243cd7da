"""The table: one row per key, agreeing with the frozen sections, and the words for what was
probably meant."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import zero_trial
from tests.docs.reference import FOLDER, keys_page
from zero_trial.ds_config.key import Support
from zero_trial.ds_config.table import TABLE, DsConfig, nearest

ROWS = list(TABLE.values())


def test_no_spelling_means_two_keys():
    seen: dict[tuple[str, str], str] = {}
    for row in ROWS:
        for name in (row.name, *row.aliases):
            assert seen.setdefault((row.parent, name), row.path) == row.path


def test_every_field_has_a_row():
    others = {item.name for item in dataclasses.fields(DsConfig)} - set(TABLE)
    assert others == {"sources", "warnings", "raw"}
    for row in ROWS:
        if row.section is not None:
            assert {f"{row.path}.{item.name}" for item in dataclasses.fields(row.section)} <= set(TABLE)


# Supported by being checked here, against other keys.
CHECKED = frozenset({"data_types.param_dtype"})


def test_what_is_supported_is_read_by_a_module():
    """An answer is true at this commit: outside this room, some module reads the field of every
    supported key."""
    package = Path(zero_trial.__file__).parent
    read: set[str] = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] != "ds_config":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TABLE:
                    read.add(TABLE[node.value].name)
    supported = [row for row in ROWS if row.support is Support.SUPPORTED and not row.is_section]
    assert [row.path for row in supported if row.name not in read and row.path not in CHECKED] == []


def test_every_row_is_whole():
    for row in ROWS:
        assert row.meaning and not row.meaning.endswith(".") and row.type.describe(), row.path
        assert row.parent in ("", *TABLE) and (not row.parent or TABLE[row.parent].is_section), row.path
        if row.support is Support.REFUSED:
            assert row.instead and row.instead.endswith("."), "a refusal says what to write instead"
        assert row.support is not Support.MAPPED or row.becomes, "a mapping says what it becomes"
        if row.default is not None:
            assert row.type.read(row.default).value == row.default and not row.asks(row.default), row.path


@pytest.mark.parametrize(
    ("parent", "name", "meant"),
    [
        ("", "zero_optimisation", "zero_optimization"),
        ("", "gradient_cliping", "gradient_clipping"),
        ("", "stage", "zero_optimization.stage"),
        ("", "stage3_prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
        ("zero_optimization", "gradient_clipping", "gradient_clipping (at the top level)"),
        ("zero_optimization", "stag", "stage"),
        ("fp16", "initial_scale_pwr", "initial_scale_power"),
        ("", "offload_optimiser", "zero_optimization.offload_optimizer"),
        ("optimizer", "lr", "optimizer.params.lr"),
        ("", "lr", "optimizer.params.lr"),
        ("scheduler", "warmup_num_steps", "scheduler.params.warmup_num_steps"),
        ("", "xyzzy", None),
    ],
)
def test_what_was_probably_meant(parent: str, name: str, meant: str | None):
    assert nearest(parent, name) == meant


def test_the_reference_page_is_the_table():
    """If this fails: python -m tests.docs.reference"""
    assert (FOLDER / "ds_config.md").read_text("utf-8") == keys_page()
