"""What libraries and scripts import of DeepSpeed is there; what is not says what to use instead."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.reference import FOLDER, names_page
from zero_trial.compat.deepspeed.deepspeed_table import OURS, REFUSED_MODULES, install_deepspeed
from zero_trial.compat.finder import StandIn

# Written in scripts of DeepSpeed's documentation and examples, and of Megatron.
SCRIPTS = """
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.comm import all_reduce, get_rank, init_distributed
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed.runtime.utils import clip_grad_norm_, see_memory_usage
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from deepspeed.utils import RepeatingLoader, groups, log_dist, logger, safe_get_full_grad, set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
""".strip().splitlines()
# Parts that transformers and accelerate import only if the user asks for a refused feature.
FEATURES = {
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.tp_model_init",
    "deepspeed.utils.zero_to_fp32.get_model_state_file",  # Lightning's own converter of checkpoints
    "deepspeed.utils.zero_to_fp32.get_optim_files",
}


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    before = list(sys.meta_path)
    yield install_deepspeed().stand_in
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_what_scripts_import_is_there(stand_in: StandIn) -> None:
    for statement in SCRIPTS:
        exec(statement, {})


@pytest.mark.parametrize("library", ["accelerate", "diffusers", "lightning", "peft", "transformers", "trl"])
def test_what_libraries_import_is_there(stand_in: StandIn, library: str) -> None:
    found = find_spec(library)
    if found is None or found.origin is None:
        pytest.skip(f"{library} is not installed")
    names = {
        (node.module, alias.name)
        for path in Path(found.origin).parent.rglob("*.py")
        if "deepspeed" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "deepspeed"
        for alias in node.names
    }
    for module, name in sorted(names):
        if module not in FEATURES and f"{module}.{name}" not in FEATURES:
            exec(f"from {module} import {name}", {})


def test_what_is_refused_says_what_to_use_instead(stand_in: StandIn) -> None:
    for name, refused in REFUSED_MODULES.items():
        module, _, last = name.rpartition(".")
        for statement in (f"import {name}", f"from {module} import {last}", f"from {name} import anything"):
            with pytest.raises(ImportError, match=re.escape(refused.reason)):
                exec(statement, {})


def test_another_name_is_refused_with_the_nearest(stand_in: StandIn) -> None:
    with pytest.raises(ImportError, match=r"Did you mean deepspeed\.ops\.adam\.FusedAdam\?"):
        exec("from deepspeed.ops.adam import FusedAdm", {})
    with pytest.raises(ImportError, match="is not in zero_trial's stand-in for deepspeed"):
        exec("import deepspeed.invented.module", {})
    utils = importlib.import_module("deepspeed.utils")
    importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert callable(utils.z3_leaf_module), "a function is not hidden by the module of its name"


def test_every_target_of_the_table_is_there() -> None:
    """A row of the table that points nowhere would fail only in the script that asks for it."""
    for names in OURS.values():
        for place, _, attribute in (target.partition(":") for target in names.values() if ":" in target):
            assert hasattr(importlib.import_module(place), attribute), (place, attribute)


def test_the_page_of_names_is_up_to_date() -> None:
    """If this fails, run python -m tests.docs.reference"""
    page = (FOLDER / "deepspeed.md").read_text(encoding="utf-8")
    assert page == names_page() and all(f"| `{module}` |" in page for module in OURS)
