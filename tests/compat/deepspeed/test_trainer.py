"""transformers' Trainer through the stand-in: the numbers of plain Trainer at every ZeRO stage, and
what else people do with ``TrainingArguments(deepspeed=...)``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Nursery, Pools

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
        reason="transformers and accelerate are in the extra 'libraries'",
    ),
]

ROOT = Path(__file__).parents[3]
WITHIN = 2e-6  # of losses near 4: about eight units in the last place of fp32


@pytest.fixture(scope="module")
def pools(nursery: Nursery) -> Iterator[Pools]:
    """Start ranks for this file alone, which have the libraries."""
    pools = Pools(nursery, ["tests.compat.deepspeed.trainers"])
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


def _on_rank(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module("tests.compat.deepspeed.trainers"), name)(*args, **kwargs)


@pytest.fixture
def ask(pools: Pools, folder: Path) -> Callable[..., Any]:
    """Return what ``name`` of tests/compat/deepspeed/trainers.py answers, on rank 0 of two."""

    def asked(name: str, *args: Any, folder: Path = folder, **kwargs: Any) -> Any:
        return pools(2).run(_on_rank, name, *args, folder=folder, timeout=180, **kwargs)[0]

    return asked


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "stages"), [("Llama", [0, 1, 2, 3]), ("T5", [2, 3]), ("Mixtral", [1, 3]), ("ViT", [0, 3])]
)
def test_thirty_losses_are_those_of_ddp(ask: Callable[..., Any], family: str, stages: list[int]) -> None:
    """Loaded by from_pretrained, at stage 3 under zero.Init; clipped by Trainer's max_grad_norm.
    What stages 0 to 2 do with gradients does not depend on the model."""
    plain, *stages = ask("beside_ddp", family, stages=stages)
    assert len(plain[0]) == 30
    assert plain[0][-1] < plain[0][0] - 0.05
    for losses, norms, rates in stages:
        assert gap(losses, plain[0]) <= WITHIN
        assert gap(norms, plain[1]) <= 1e-5 * max(plain[1])
        assert rates == plain[2]
    assert all(losses == stages[0][0] for losses, _, _ in stages)


def test_thirty_losses_of_long_samples_are_those_of_ddp(ask: Callable[..., Any]) -> None:
    plain, *stages = ask("long_beside_ddp")
    assert all(gap(losses, plain[0]) <= WITHIN for losses, _, _ in stages)
    assert all(gap(norms, plain[1]) <= 1e-5 * max(plain[1]) for _, norms, _ in stages)


def test_trainer_that_keeps_one_checkpoint_never_deletes_the_last_complete_one(ask: Callable[..., Any]) -> None:
    """The first save of all has none before it."""
    _, *later, last = ask("complete_after_saves", limit=1)
    assert later == [1, 1, 1] and last == 1


def test_experts_without_tokens(ask: Callable[..., Any]) -> None:
    plain, *stages = ask("beside_ddp", "Mixtral", stages=[2, 3], alike=True, max_steps=8)
    assert all(gap(losses, plain[0]) <= WITHIN for losses, _, _ in stages)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_accumulation_steps": 3, "max_steps": 10}, id="accumulation"),
        # 30 batches per epoch: the last step of each has two
        pytest.param({"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1}, id="an uneven epoch"),
        pytest.param({"max_grad_norm": 0.1, "max_steps": 10}, id="clipping"),
        pytest.param({"activation_checkpointing": True, "max_steps": 10}, id="activation checkpointing"),
    ],
)
def test_options_of_trainer(ask: Callable[..., Any], options: dict[str, Any]) -> None:
    plain, *stages = ask("beside_ddp", "Llama", stages=[2, 3], **options)
    assert all(gap(losses, plain[0]) <= WITHIN for losses, _, _ in stages)


def test_runs_are_resumed_at_another_stage_and_on_other_ranks(
    ask: Callable[..., Any], pools: Pools, folder: Path
) -> None:
    found = ask("saved_and_resumed")
    (same, other), whole = found["again"], found["whole"]
    assert same == whole
    assert gap(other, whole) <= 1e-6
    moved = pools(3).run(_on_rank, "resumed", folder=folder, stage=3, timeout=180)[0]
    assert len(moved) == 30
    assert gap(moved, whole) <= 1e-6


def test_the_best_model_is_loaded_at_the_end(ask: Callable[..., Any]) -> None:
    last, (first, *later) = ask("best_model")
    assert max(later[:2]) < first  # so that the last step's model is another
    assert last == first


def test_embeddings_are_resized_under_init(ask: Callable[..., Any]) -> None:
    (plain, shape), *stages = ask("resized", stages=[2, 3])
    assert shape == (71, 32)
    assert all(size == shape and gap(losses, plain) <= WITHIN for losses, size in stages)


HEADS = ["BERT", "RoBERTa", "DistilBERT", "ELECTRA", "ALBERT", "DeBERTa", "ModernBERT", "GPT-2", "T5"]


@pytest.mark.parametrize(
    ("family", "resize"), [*((family, resize) for family in HEADS for resize in (False, True)), ("Wav2Vec2", False)]
)
def test_weights_are_loaded_in_shards(ask: Callable[..., Any], family: str, resize: bool) -> None:
    """Heads tie their weights, and pad a bias to the length of its weight, when zero.Init has
    ended."""
    assert ask("built_in_shards", family, resize=resize) == []


def test_optimizer_and_schedule_of_the_ds_config(ask: Callable[..., Any]) -> None:
    found = ask("configured")
    assert gap(found["ds_config's"], found["Trainer's"]) <= WITHIN
    assert found["resumed"] == found["with a schedule"]
    assert len(set(found["rates"])) > 5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits(ask: Callable[..., Any], dtype: str) -> None:
    (first, *others), stored, evaluated = ask("narrow", dtype=dtype)
    assert first[-1] < first[0] - 0.05
    assert all(losses == first for losses in others)
    assert stored == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    assert abs(evaluated - first[-1]) < 0.3


def test_weights_are_saved_whole_or_as_shards(ask: Callable[..., Any]) -> None:
    found = ask("weights_on_disk")
    assert abs(found["trainer"] - found["file"]) <= WITHIN
    assert "model.safetensors" in found["only"]
    assert not [name for name in found["only"] if name.startswith("global_step")]
    assert "global_step5" in found["sharded"]
    assert "model.safetensors" not in found["sharded"]


def test_generated_tokens_are_those_of_plain_trainer(ask: Callable[..., Any]) -> None:
    (loss, tokens), *stages = ask("generated", stages=[None, 1, 3])
    assert all(gap([ours], [loss]) <= WITHIN and theirs == tokens for ours, theirs in stages)


def test_ranks_generate_different_numbers_of_tokens(ask: Callable[..., Any], pools: Pools, folder: Path) -> None:
    ask("beside_ddp", "Llama", stages=[], max_steps=1)
    assert pools(2).run(_on_rank, "lengths_differ", folder=folder, timeout=60) == [[1, 7], [1, 12]]


def test_accelerate_alone(ask: Callable[..., Any]) -> None:
    """Its accumulation enters ``no_sync`` at stages 0 and 1; at stage 3 rank 1 has no state dict to
    save, and asks the model for one."""
    (plain, _), *stages = ask("by_hand", stages=[None, 0, 1, 2, 3])
    assert plain[-1] < plain[0] - 0.05
    assert all(gap(losses, plain) <= WITHIN and far <= WITHIN for losses, far in stages)


# --- how scripts are started ----------------------------------------------------------------------

SCRIPT = """
import json, sys, torch
# Trainer imports them if they are there, which takes a third of a rank's start.
sys.modules.update(dict.fromkeys(("bitsandbytes", "datasets", "pandas", "peft")))
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from tests.compat.deepspeed.samples import Samples

arguments = json.loads(sys.argv[1])
args = TrainingArguments(max_steps=3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, **arguments)
torch.manual_seed(1)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**shape)), args=args, train_dataset=Samples("Llama", 96))
trainer.train()
if trainer.is_world_process_zero():
    stage = trainer.model_wrapped.zero_optimization_stage()
    with open(arguments["output_dir"] + "/found.json", "w") as file:
        json.dump([stage, args.world_size, [e["loss"] for e in trainer.state.log_history if "loss" in e]], file)
"""
# as `accelerate config` writes it
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 1}
num_machines: 1
num_processes: 2
"""
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
LAUNCHERS = {
    "zero-trial launch": ["-m", "zero_trial.cli.main", "launch", "--as-deepspeed", "--num_gpus", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone"],
    "accelerate launch": ["-m", "zero_trial.as_deepspeed", *ACCELERATE],
}


def test_a_script_is_started_in_three_ways(tmp_path: Path) -> None:
    """By launchers in the order of LAUNCHERS: an unchanged script, one with the import as its first
    line, and an unchanged one whose ds_config accelerate makes of its own file. None says that it
    runs on CPUs. torchrun starts one rank, which takes the batches that two share."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "imports.py").write_text("import zero_trial.as_deepspeed\n" + SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    targets = [["script.py"], ["imports.py"], ["script.py"]]
    options = {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}}
    found = []
    for number, (launcher, target) in enumerate(zip(LAUNCHERS.values(), targets, strict=True)):
        given = {"output_dir": str(tmp_path / str(number)), "per_device_train_batch_size": 16 if number == 1 else 8}
        given |= options if number < 2 else {}
        (tmp_path / str(number)).mkdir()
        command = [sys.executable, *launcher, *target, json.dumps(given)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((tmp_path / str(number) / "found.json").read_text()))
    assert [one[:2] for one in found] == [[2, 2], [2, 1], [2, 2]]
    assert found[2] == found[0]  # bit for bit
    assert gap(found[1][2], found[0][2]) <= WITHIN
    assert len(set(found[0][2])) == 3
