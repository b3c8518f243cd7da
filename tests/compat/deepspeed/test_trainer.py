"""transformers' Trainer, TRL's trainers and PEFT through the stand-in: the numbers of the same
trainers under DDP at every ZeRO stage, and what else people do with
``TrainingArguments(deepspeed=...)``."""

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

HAS_TRAINER, HAS_TRL = (
    all(importlib.util.find_spec(name) for name in names)
    for names in (("transformers", "accelerate"), ("datasets", "peft", "trl"))
)
missing = "{} are in the extra 'libraries'"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRAINER, reason=missing.format("transformers and accelerate")),
]
needs_bitsandbytes = pytest.mark.skipif(
    not importlib.util.find_spec("bitsandbytes"), reason=missing.format("bitsandbytes")
)
needs_trl = pytest.mark.skipif(not HAS_TRL, reason=missing.format("datasets, peft and trl"))

ROOT = Path(__file__).parents[3]
WITHIN = 2e-6  # of losses near 4: about eight units in the last place of fp32
# Under DDP bf16 is autocast: fp32 weights are rounded to bf16 for each product. An engine's weights
# are bf16, and so is what is between the products: an element in 256 may differ by one unit of its
# eight bits, a mean over 200 tokens near 4 by about 1e-4 (measured: 4e-4 at most).
WITHIN_BF16 = 1e-3


@pytest.fixture(scope="module")
def pools(nursery: Nursery) -> Iterator[Pools]:
    """Start ranks for this file alone, which have the libraries."""
    pools = Pools(nursery, [f"tests.compat.deepspeed.{'tuners' if HAS_TRL else 'trainers'}"])
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


def _on_rank(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module(f"tests.compat.deepspeed.{module}"), name)(*args, **kwargs)


@pytest.fixture
def ask(pools: Pools, folder: Path) -> Callable[..., Any]:
    """Return what ``name`` of tests/compat/deepspeed/trainers.py answers, on rank 0 of two."""

    def asked(name: str, *args: Any, **kwargs: Any) -> Any:
        return pools(2).run(_on_rank, "trainers", name, *args, folder=folder, timeout=180, **kwargs)[0]

    return asked


@pytest.fixture
def ask_tuner(pools: Pools, tmp_path: Path) -> Callable[..., Any]:
    """Return the same of tests/compat/deepspeed/tuners.py."""

    def asked(name: str, *args: Any, ranks: int = 2, **kwargs: Any) -> Any:
        return pools(ranks).run(_on_rank, "tuners", name, *args, folder=tmp_path, timeout=180, **kwargs)[0]

    return asked


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("family", "stages"), [("Llama", [0, 3]), ("T5", [2]), ("Mixtral", [1, 3]), ("ViT", [3])])
def test_losses_are_those_of_ddp(ask: Callable[..., Any], family: str, stages: list[int]) -> None:
    """Loaded by from_pretrained, at stage 3 under zero.Init; clipped by Trainer's max_grad_norm.
    What stages 0 to 2 do with gradients does not depend on the model."""
    plain, *stages = ask("beside_ddp", family, stages=stages, max_steps=30)
    assert len(plain[0]) == 30 and plain[0][-1] < plain[0][0] - 0.05
    for losses, norms, rates in stages:
        assert gap(losses, plain[0]) <= WITHIN
        assert gap(norms, plain[1]) <= 1e-5 * max(plain[1])
        assert rates == plain[2]
    assert all(losses == stages[0][0] for losses, _, _ in stages)


def test_losses_of_long_samples_are_those_of_ddp(ask: Callable[..., Any]) -> None:
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
    ("stage", "options"),
    [
        (2, {"gradient_accumulation_steps": 3, "max_steps": 8}),
        # 30 batches per epoch: the last step of each has two
        (3, {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1}),
        (2, {"max_grad_norm": 0.1, "max_steps": 8}),
        (3, {"activation_checkpointing": True, "max_steps": 8}),
    ],
    ids=["accumulation", "an uneven epoch", "clipping", "activation checkpointing"],
)
def test_options_of_trainer(ask: Callable[..., Any], stage: int, options: dict[str, Any]) -> None:
    plain, (losses, *_) = ask("beside_ddp", "Llama", stages=[stage], **options)
    assert gap(losses, plain[0]) <= WITHIN


def test_runs_are_resumed_at_another_stage_and_on_other_ranks(
    ask: Callable[..., Any], pools: Pools, folder: Path
) -> None:
    found = ask("saved_and_resumed")
    (same, other), whole = found["again"], found["whole"]
    assert same == whole
    assert gap(other, whole) <= 1e-6
    moved = pools(3).run(_on_rank, "trainers", "resumed", folder=folder, stage=3, timeout=180)[0]
    assert len(moved) == 8 and gap(moved, whole) <= 1e-6


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


@pytest.mark.parametrize(("dtype", "stages"), [("bf16", [0, 3]), ("fp16", [2, 3])])
def test_sixteen_bits(ask: Callable[..., Any], dtype: str, stages: list[int]) -> None:
    (first, *others), stored, evaluated = ask("narrow", dtype=dtype, stages=stages)
    assert first[-1] < first[0] - 0.02
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
    (loss, tokens), *stages = ask("generated", stages=[None, 3])
    assert all(gap([ours], [loss]) <= WITHIN and theirs == tokens for ours, theirs in stages)


def test_accelerate_alone(ask: Callable[..., Any]) -> None:
    """Its accumulation enters ``no_sync`` at stages 0 and 1; at stage 3 rank 1 has no state dict to
    save, and asks the model for one."""
    (plain, _), *stages = ask("by_hand", stages=[None, 1, 3])
    assert plain[-1] < plain[0] - 0.05
    assert all(gap(losses, plain) <= WITHIN and far <= WITHIN for losses, far in stages)


@pytest.mark.skipif(not importlib.util.find_spec("optuna"), reason=missing.format("optuna is"))
@pytest.mark.parametrize(("stage", "evaluates"), [(2, True), (3, True), (3, False)])
def test_optuna_gives_every_rank_the_same_hyperparameters(ask: Callable[..., Any], stage: int, evaluates: bool) -> None:
    """A sampler of rank 0 alone chooses them; the others have none. The ds_config's optimizer has
    them too: the best point trains to the same loss without a search."""
    (first, second), objective, alone = ask("searched", stage=stage, evaluates=evaluates)
    assert first == second and len(set(first)) == 3
    assert objective == alone


# --- TRL and PEFT -------------------------------------------------------------------------------


@needs_trl
@pytest.mark.parametrize(
    ("kind", "adapters", "stages"),
    [
        ("SFT", False, [0, 3]),
        ("DPO", False, [1]),
        ("GRPO", False, [3]),
        ("SFT", True, [1, 3]),
        ("DPO", True, [3]),
        ("GRPO", True, [2]),
    ],
)
def test_losses_of_trl_are_those_of_ddp(
    ask_tuner: Callable[..., Any], kind: str, adapters: bool, stages: list[int]
) -> None:
    """GRPO's losses are of completions that the model has sampled: other tokens, other losses."""
    plain, *found = ask_tuner("losses", kind, stages=[None, *stages], adapters=adapters, max_steps=4)
    assert len(plain) == 4 and len(set(plain)) > 2
    assert all(gap(losses, plain) <= WITHIN and losses == found[0] for losses in found)


@needs_trl
def test_generation_without_gathering_the_whole_model(ask_tuner: Callable[..., Any]) -> None:
    """Blocks are gathered as they compute, and ranks that are done go on for the others."""
    plain, without = ask_tuner("losses", "GRPO", stages=[None, 3], max_steps=4, ds3_gather_for_generation=False)
    assert gap(without, plain) <= WITHIN


@needs_trl
@pytest.mark.parametrize(("kind", "adapters"), [("SFT", True), ("DPO", False)])
def test_trl_in_bf16(ask_tuner: Callable[..., Any], kind: str, adapters: bool) -> None:
    """Adapters train with a rate at which they move the losses 10 times as far as `WITHIN_BF16`."""
    rate = {"learning_rate": 3e-2} if adapters else {}
    plain, first, *others = ask_tuner(
        "losses", kind, stages=[None, 0, 3], bf16=True, adapters=adapters, max_steps=8, **rate
    )
    assert first[-1] < first[0] - 10 * WITHIN_BF16
    assert gap(first, plain) <= WITHIN_BF16
    assert all(losses == first for losses in others)


@needs_trl
def test_bf16_with_adapters_of_trainer(ask_tuner: Callable[..., Any]) -> None:
    """All of the adapters' gradients are other than zero: their first values are random."""
    plain, *found = ask_tuner("lora", stages=[None, 0, 3], more={}, bf16=True, max_steps=8)
    for run in found:
        assert gap(run["losses"], plain["losses"]) <= WITHIN_BF16
        assert run["losses"] == found[0]["losses"]
        assert run["shapes"] == plain["shapes"]
        assert 20 * max(run["far"][name] for name in ("loaded", "merged", "merged here")) < run["far"]["base"]


@needs_trl
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.extended)])
def test_the_number_of_ranks(ask_tuner: Callable[..., Any], ranks: int) -> None:
    """The same global batch, cut otherwise: one loss trace."""
    options = {"stages": [None, 3], "per_device_train_batch_size": 4, "max_steps": 4}
    expected, *_ = ask_tuner("losses", "SFT", **options)
    options["per_device_train_batch_size"] = 8 // ranks
    plain, *found = ask_tuner("losses", "SFT", ranks=ranks, **options)
    assert all(gap(losses, expected) <= WITHIN for losses in (plain, *found))
    assert all(losses == found[0] for losses in found)


@needs_trl
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}], ids=["adapters", "modules"])
def test_saved_adapters_are_trained_further_at_stage_3(ask_tuner: Callable[..., Any], more: dict[str, Any]) -> None:
    assert ask_tuner("trained_further", more=more) == []


@needs_trl
@pytest.mark.parametrize(
    ("more", "stages"), [({}, [None, 0, 3]), ({"modules_to_save": ["lm_head", "embed_tokens"]}, [None, 2, 3])]
)
def test_adapters_are_saved_whole(
    ask_tuner: Callable[..., Any], more: dict[str, Any], stages: list[int | None]
) -> None:
    """Loaded in plain PEFT, and merged there or here, they give the logits of the trained model."""
    plain, *found = ask_tuner("lora", stages=stages, more=more, max_steps=4)
    assert len(plain["shapes"]) == 8 + len(more.get("modules_to_save", []))
    for run in found:
        assert gap(run["losses"], plain["losses"]) <= WITHIN
        assert run["losses"] == found[0]["losses"]
        assert run["shapes"] == plain["shapes"]
        assert run["far"].pop("base") > 0.1  # so that a lost adapter would show
        assert max(run["far"].values()) <= WITHIN


@needs_trl
def test_tiled_mlps_under_trl(ask_tuner: Callable[..., Any]) -> None:
    """SFTTrainer computes its loss without the logits itself."""
    (plain,), found = (ask_tuner("losses", "SFT", stages=s, tiles=t) for s, t in (([None], 0), ([0, 3], 3)))
    assert all(gap(losses, plain) <= WITHIN for losses in found)


@needs_trl
@needs_bitsandbytes
def test_a_base_in_four_bits(ask_tuner: Callable[..., Any]) -> None:
    """TRL makes adapters of such a base bf16, which have fp32 masters in an engine alone."""
    options = {"stages": [None, 0, 2, 3], "learning_rate": 3e-2, "max_steps": 8}
    (plain, saved), *stages = ask_tuner("qlora", **options)
    assert plain[-1] < plain[0] - 0.01 and len(saved) == 8
    for losses, adapters in stages:
        assert gap(losses, plain) <= WITHIN and losses == stages[0][0]
        assert all((value - saved[name]).abs().max() <= WITHIN for name, value in adapters.items())
    plain, *found = ask_tuner("losses", "SFT", adapters=True, four_bits=True, **options)
    assert plain[-1] < plain[0] - 10 * WITHIN_BF16
    assert all(gap(losses, plain) <= WITHIN_BF16 and losses == found[0] for losses in found)


@needs_trl
@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=["modules", "DoRA"])
def test_adapters_are_handed_to_a_server_merged(ask_tuner: Callable[..., Any], more: dict[str, Any]) -> None:
    for right, same, far in ask_tuner("merged_for_a_server", stages=[2, 3], more=more):
        assert right and same and far <= WITHIN


@needs_trl
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_trl_samples_from_a_server_that_has_the_weights_of_each_step(
    ask_tuner: Callable[..., Any], adapters: bool
) -> None:
    """TRL's own code gathers weights, merges adapters in place, and takes them out again."""
    plain, *stages = ask_tuner("with_a_server", stages=[None, 1, 3], adapters=adapters)
    assert len(set(plain[0])) > 2
    for losses, ratios in (plain, *stages):
        assert len(ratios) == 12 and max(abs(ratio - 1) for ratio in ratios) <= 1e-5
        assert gap(losses, plain[0]) <= WITHIN


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
LAUNCHERS = [
    ["-m", "zero_trial.cli.main", "launch", "--as-deepspeed", "--num_gpus", "2"],
    ["-m", "zero_trial.as_deepspeed", *ACCELERATE],
]


def test_a_script_is_started_in_two_ways(tmp_path: Path) -> None:
    """Unchanged, by our launcher with a ds_config, and by accelerate's, which makes one of its own
    file. Neither is told that it runs on CPUs. torchrun starts the ranks of test_det_callback."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    found = []
    for number, launcher in enumerate(LAUNCHERS):
        given: dict[str, Any] = {"output_dir": str(tmp_path / str(number)), "per_device_train_batch_size": 8}
        zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
        given |= {"deepspeed": zero} if number == 0 else {}
        (tmp_path / str(number)).mkdir()
        command = [sys.executable, *launcher, "script.py", json.dumps(given)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((tmp_path / str(number) / "found.json").read_text()))
    assert found[0] == found[1]  # bit for bit
    assert found[0][:2] == [2, 2] and len(set(found[0][2])) == 3
