"""The table: one row per key, agreeing with the frozen sections, and the words for what was
probably meant."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import zero_trial
from zero_trial.ds_config.key import Key, Support
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_every_row_is_whole(row: Key):
    assert row.meaning and not row.meaning.endswith(".")
    assert row.type.describe()
    assert row.parent in ("", *TABLE), "its section has no row"
    if row.parent:
        assert TABLE[row.parent].is_section
    if row.support is Support.REFUSED:
        assert row.instead and row.instead.endswith("."), "a refusal says what to write instead"
    if row.support is Support.MAPPED:
        assert row.becomes, "a mapping says what it becomes"


@pytest.mark.parametrize("row", [row for row in ROWS if row.default is not None], ids=lambda row: row.path)
def test_every_default_is_of_its_kind_and_asks_for_nothing(row: Key):
    assert row.type.read(row.default).value == row.default
    assert not row.asks(row.default)


DEEPSPEED_0_19_8: dict[str, Any] = {
    "train_batch_size": None, "gradient_clipping": 1.0, "steps_per_print": None, "prescale_gradients": False,
    "gradient_predivide_factor": 1.0, "communication_data_type": None, "dataloader_drop_last": False,
    "fp16.enabled": False, "fp16.loss_scale": 0.0, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2, "fp16.consecutive_hysteresis": False, "fp16.min_loss_scale": 1.0,
    "bf16.enabled": False, "bf16.check_grad_overflow": True,
    "zero_optimization.stage": 0, "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000, "zero_optimization.overlap_comm": None,
    "zero_optimization.prefetch_bucket_size": 50_000_000, "zero_optimization.param_persistence_threshold": 100_000,
    "zero_optimization.model_persistence_threshold": 2**63 - 1, "zero_optimization.max_live_parameters": 10**9,
    "zero_optimization.max_reuse_distance": 10**9, "zero_optimization.sub_group_size": 10**9,
    "zero_optimization.offload_optimizer.pin_memory": True, "zero_optimization.offload_param.buffer_count": 5,
    "zero_optimization.memory_efficient_linear": True, "zero_optimization.allgather_partitions": True,
    "activation_checkpointing.number_checkpoints": None, "pipeline.pipe_partitioned": True,
    "checkpoint.tag_validation": "Warn", "flops_profiler.module_depth": -1, "wandb.project": "deepspeed",
    "aio.block_size": 1048576, "aio.overlap_events": True, "comms_logger.prof_all": True,
}  # fmt: skip


@pytest.mark.parametrize(("path", "default"), DEEPSPEED_0_19_8.items())
def test_defaults_are_those_of_deepspeed(path: str, default: Any):
    assert TABLE[path].default == default


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
