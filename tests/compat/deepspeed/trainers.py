"""What test_trainer.py runs on its ranks: transformers' Trainer, alone (then it uses DDP) and with
a ds_config through the shim. Nothing here knows zero_trial but the first import.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zero_trial.as_deepspeed  # noqa: F401  isort: skip

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.compat.deepspeed.samples import VOCABULARY, Samples
from zero_trial import long_samples

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA, HEAD = SHAPE | {"num_key_value_heads": 2}, SHAPE | {"intermediate_size": 48}
VOCAB, IMAGES = {"vocab_size": VOCABULARY}, {name: value for name, value in SHAPE.items() if name != "vocab_size"}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
CONVOLUTIONS = {"conv_dim": [16, 16], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA | {"intermediate_size": 64}),
    "Mixtral": (
        "MixtralForCausalLM",
        LLAMA | {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "T5": ("T5ForConditionalGeneration", VOCAB | T5 | {"decoder_start_token_id": 0, "initializer_factor": 0.3}),
    "BERT": ("BertForMaskedLM", HEAD),
    "RoBERTa": ("RobertaForMaskedLM", HEAD | {"pad_token_id": 1}),
    "DistilBERT": ("DistilBertForMaskedLM", VOCAB | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "ELECTRA": ("ElectraForMaskedLM", HEAD | {"embedding_size": 16}),
    "ALBERT": ("AlbertForMaskedLM", HEAD | {"embedding_size": 16}),
    "DeBERTa": ("DebertaV2ForMaskedLM", HEAD),
    "ModernBERT": ("ModernBertForMaskedLM", HEAD | dict.fromkeys(SPECIAL, 1)),
    "GPT-2": ("GPT2LMHeadModel", VOCAB | {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        HEAD | CONVOLUTIONS | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    ),
    "ViT": (
        "ViTForImageClassification",
        IMAGES | {"image_size": 16, "patch_size": 4, "intermediate_size": 64, "num_labels": 5},
    ),
}


def ds_config(stage: int, zero: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Return a ds_config as people write it for Trainer."""
    section = {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    section |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": section | (zero or {}), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return config | dict.fromkeys(autos, "auto") | keys


def in_config(scheduler: bool = False) -> dict[str, Any]:
    """Return an optimizer for a ds_config, with a schedule if asked for."""
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    found: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
    if scheduler:
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        found["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    return found


def forget() -> None:
    """Let the next Trainer of this process begin as in a new one: with the variable that an earlier
    Accelerator has set, one without a ds_config would have an engine."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    unset_hf_deepspeed_config()


def arguments(out: Path, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> TrainingArguments:
    """Begin again, and return what all runs here have in common."""
    forget()
    common: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 12,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 5,
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return kind(**common | options)


def alone(act: Callable[[], object]) -> None:
    """Let rank 0 act while the others wait."""
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def pretrained(family: str, folder: Path) -> Path:
    """Save a model with random weights for from_pretrained."""
    name, shape = FAMILIES[family]

    def save() -> None:
        transformers.set_seed(3)
        cls = getattr(transformers, name)
        cls(cls.config_class(**shape)).save_pretrained(folder / family)

    forget()
    if not (folder / family).exists():
        dist.barrier()
        alone(save)
    return folder / family


def load(family: str, folder: Path, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return getattr(transformers, FAMILIES[family][0]).from_pretrained(folder / family, dtype=dtype or "auto", **more)


def loaded_dtype(config: dict[str, Any] | None, options: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype for from_pretrained with which a run in 16 bits starts from the same weights
    as at stage 3, where zero.Init rounds them."""
    if config is None or config["zero_optimization"]["stage"] == 3:
        return None
    return torch.bfloat16 if options.get("bf16") else torch.float16 if options.get("fp16") else None


def trained(
    family: str,
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    resume: Path | None = None,
    change: Callable[[Any], object] | None = None,
    alike: bool = False,
    **options: Any,
) -> Trainer:
    """Train a model of ``family``, which is loaded when Trainer's arguments exist: at stage 3 that
    is under zero.Init."""
    args = arguments(folder / "out", deepspeed=config, **options)
    model = load(family, folder, loaded_dtype(config, options))
    if change is not None:
        change(model)
    data = {"train_dataset": Samples(family, alike=alike), "eval_dataset": Samples(family, 40)}
    trainer = Trainer(model=model, args=args, **data)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    require_peer(trainer, config)
    return trainer


def require_peer(trainer: Trainer, config: dict[str, Any] | None) -> None:
    """Raise AssertionError where a run without a ds_config had an engine, or one with it none."""
    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, DistributedDataParallel if config is None else deepspeed.DeepSpeedEngine), type(wrapped)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def curves(trainer: Trainer) -> tuple[list[float], list[float], list[float]]:
    """Return a run's losses, gradient norms and learning rates."""
    return logged(trainer, "loss"), logged(trainer, "grad_norm"), logged(trainer, "learning_rate")


# --- what the tests ask ---------------------------------------------------------------------------

Curves = tuple[list[float], list[float], list[float]]


def beside_ddp(family: str, folder: Path, stages: list[int], **options: Any) -> list[Curves]:
    """Return the curves of plain Trainer, and of each stage."""
    pretrained(family, folder)
    runs = [trained(family, folder, **options)]
    runs += [trained(family, folder, ds_config(stage), **options) for stage in stages]
    return [curves(run) for run in runs]


def long_beside_ddp(folder: Path) -> list[Curves]:
    """Return the curves of plain Trainer, and of models with chunked losses and tiled MLPs."""
    pretrained("Llama", folder)
    runs = [trained("Llama", folder)]
    runs += [trained("Llama", folder, ds_config(stage), change=partial(long_samples, tiles=3)) for stage in (0, 3)]
    return [curves(run) for run in runs]


def saved_and_resumed(folder: Path) -> dict[str, Any]:
    """Train at stage 3 with checkpoints; resume there, and at stage 1."""
    pretrained("Llama", folder)
    alone(lambda: shutil.rmtree(folder / "kept", ignore_errors=True))
    keeps = {"save_strategy": "steps", "save_steps": 4, "output_dir": str(folder / "kept")}
    whole = trained("Llama", folder, ds_config(3), max_steps=8, **keeps)
    first = folder / "kept" / "checkpoint-4"
    again = [trained("Llama", folder, ds_config(stage), resume=first, max_steps=8) for stage in (3, 1)]
    return {"whole": curves(whole)[0], "again": [curves(run)[0] for run in again]}


def complete_after_saves(folder: Path, limit: int) -> list[int]:
    """Count the complete checkpoints after each save in the background, when Trainer has deleted
    those above its ``save_total_limit``."""
    pretrained("Llama", folder)
    out, found = folder / f"at most {limit}", []
    delete = transformers.trainer.rotate_checkpoints

    def deleted(*args: Any, **kwargs: Any) -> None:
        delete(*args, **kwargs)
        found.append(len(list(out.glob("checkpoint-*/global_step?/manifest.json"))))

    config = ds_config(2, checkpoint={"writer": {"decoupled": True}})
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "save_total_limit": limit}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.trainer, "rotate_checkpoints", deleted)
        trained("Llama", folder, config, output_dir=str(out), **options).model_wrapped.wait_for_checkpoint()
    return [*found, len(list(out.glob("checkpoint-*/global_step?/manifest.json")))]


def resumed(folder: Path, stage: int) -> list[float]:
    """Resume what :func:`saved_and_resumed` has saved, with the same global batch on 3 ranks."""
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 8}
    return curves(trained("Llama", folder, ds_config(stage), resume=folder / "kept" / "checkpoint-4", **options))[0]


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, whole, tied ones under each name."""
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters(param):
            found[name] = param.detach().clone()
    return found


def built_in_shards(family: str, folder: Path, resize: bool) -> list[str]:
    """Name the weights that from_pretrained gives another value at stage 3 than without a
    ds_config, and where all tokens that the model had keep their vectors: ``resize`` adds nine."""
    pretrained(family, folder)
    models = []
    for config in (None, ds_config(3)):
        arguments(folder / "out", deepspeed=config)
        models.append(load(family, folder))
        if resize:
            models[-1].resize_token_embeddings(VOCABULARY + 9, mean_resizing=False)
    plain, ours = map(weights, models)
    forget()
    assert list(ours) == list(plain)
    same = {name: value.shape == plain[name].shape for name, value in ours.items()}
    return [
        name for name in ours if not (same[name] and torch.equal(ours[name][:VOCABULARY], plain[name][:VOCABULARY]))
    ]


def configured(folder: Path) -> dict[str, list[float]]:
    """Train with the optimizer, and the schedule, of the ds_config; resume such a run."""
    pretrained("Llama", folder)
    whole = trained("Llama", folder, ds_config(3, **in_config(True)), save_strategy="steps", save_steps=5, max_steps=10)
    again = trained("Llama", folder, ds_config(3, **in_config(True)), resume=folder / "out/checkpoint-5", max_steps=10)
    return {
        "Trainer's": curves(trained("Llama", folder, max_steps=10))[0],
        "ds_config's": curves(trained("Llama", folder, ds_config(2, **in_config()), max_steps=10))[0],
        "with a schedule": curves(whole)[0],
        "resumed": curves(again)[0],
        "rates": curves(whole)[2],
    }


def narrow(folder: Path, dtype: str, stages: list[int]) -> tuple[list[list[float]], str, float]:
    """Train in bf16 or fp16."""
    pretrained("Llama", folder)
    runs = [trained("Llama", folder, ds_config(stage), **{dtype: True}) for stage in stages]
    return [curves(run)[0] for run in runs], str(runs[-1].model.dtype), runs[-1].evaluate()["eval_loss"]


def weights_on_disk(folder: Path) -> dict[str, Any]:
    """Save models at stage 3: weights alone, and where they are not to be gathered."""
    pretrained("Llama", folder)
    only = {"save_strategy": "steps", "save_steps": 5, "max_steps": 5, "save_only_model": True}
    run = trained("Llama", folder, ds_config(3), output_dir=str(folder / "only"), **only)
    loss = run.evaluate()["eval_loss"]
    kept = trained("Llama", folder, ds_config(3, {"stage3_gather_16bit_weights_on_model_save": False}), max_steps=5)
    kept.save_model(str(folder / "sharded"))
    forget()
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "only" / "checkpoint-5")
    tokens = torch.stack([Samples("Llama", 40)[index]["input_ids"] for index in range(40)])
    return {
        "trainer": loss,
        "file": model(input_ids=tokens, labels=tokens).loss.item(),
        "only": sorted(path.name for path in (folder / "only" / "checkpoint-5").iterdir()),
        "sharded": sorted(path.name for path in (folder / "sharded").iterdir()),
    }


def generated(folder: Path, stages: list[int | None]) -> list[tuple[float, list[list[int]]]]:
    """Train a T5 and return the loss of an evaluation with generate, and what it generates."""
    pretrained("T5", folder)
    found = []
    for stage in stages:
        config = ds_config(stage) if stage is not None else None
        options = {"deepspeed": config, "max_steps": 6, "predict_with_generate": True, "generation_max_length": 9}
        args = arguments(folder / "out", Seq2SeqTrainingArguments, **options)
        data = {"train_dataset": Samples("T5"), "eval_dataset": Samples("T5", 18)}
        trainer = Seq2SeqTrainer(model=load("T5", folder), args=args, **data)  # type: ignore[arg-type]
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        shown = trainer.predict(Samples("T5", 18))
        found.append((trainer.evaluate()["eval_loss"], torch.as_tensor(shown.predictions).tolist()))
    return found


def by_hand(folder: Path, stages: list[int | None], steps: int = 4) -> list[tuple[list[float], float]]:
    """Train with accelerate alone, accumulating over two batches, and save as its pages say: return
    the losses, and how far what is loaded from the file is from the trained model. Stage None is
    accelerate with DDP."""
    path = pretrained("Llama", folder)
    found = []
    for stage in stages:
        forget()
        zero = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "zero3_save_16bit_model": True}
        plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage, **zero)  # type: ignore[arg-type]
        accelerator = Accelerator(cpu=stage is None, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
        model = load("Llama", folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # 5 batches per rank and epoch: the last step of each has one
        data = torch.utils.data.DataLoader(Samples("Llama", 40), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        losses = []
        for batch in [batch for _ in range(steps) for batch in data][: 2 * steps]:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        plain = accelerator.unwrap_model(model)
        whole = accelerator.get_state_dict(model)
        plain.save_pretrained(path / "saved", is_main_process=accelerator.is_main_process, state_dict=whole)
        accelerator.wait_for_everyone()
        forget()  # else the model is built in shards
        again = transformers.LlamaForCausalLM.from_pretrained(path / "saved")
        with torch.no_grad():
            far = (again(batch["input_ids"]).logits - plain(batch["input_ids"]).logits).abs().max()
        found.append((losses, float(far)))
    return found


class SearchingTrainer(Trainer):
    """The Trainer of docs/guide/huggingface.md, with which Optuna searches on several ranks."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        if self.hp_search_backend is not None:
            if self.objective is None:
                self.objective = self.compute_objective(self.evaluate())
            self.accelerator.free_memory()
        return output


class Points(TrainerCallback):
    """Keeps what each trial trains with on this rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((args.learning_rate, args.per_device_train_batch_size))


def searched(folder: Path, stage: int, evaluates: bool) -> tuple[list[Any], Any, float]:
    """Search with Optuna. Return every rank's points, the best run, and the loss that its values
    give without a search."""
    optuna = pytest.importorskip("optuna", reason="optuna is in the extra 'libraries'")
    optuna.logging.disable_default_handler()

    def space(trial: Any) -> dict[str, Any]:
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        size = trial.suggest_categorical("per_device_train_batch_size", [2, 6])
        return {"learning_rate": rate, "per_device_train_batch_size": size}

    pretrained("Llama", folder)
    options = {"max_steps": 4} | ({"eval_strategy": "steps", "eval_steps": 2} if evaluates else {})
    args = arguments(folder / "search", deepspeed=ds_config(stage, **in_config()), **options)
    data = {"train_dataset": Samples("Llama"), "eval_dataset": Samples("Llama", 40)}
    points = Points()
    trainer = SearchingTrainer(model_init=lambda *_: load("Llama", folder), args=args, callbacks=[points], **data)
    trainer.remove_callback(PrinterCallback)
    sampler, pruner = optuna.samplers.RandomSampler(seed=dist.get_rank()), optuna.pruners.NopPruner()
    best = trainer.hyperparameter_search(
        space, n_trials=3, direction="minimize", backend="optuna", sampler=sampler, pruner=pruner
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, points.seen)
    chosen: list[Any] = [best and best.hyperparameters]
    dist.broadcast_object_list(chosen)
    alone = trained("Llama", folder, ds_config(stage, **in_config()), max_steps=4, **chosen[0])
    return everyone, best and best.objective, alone.evaluate()["eval_loss"]
