"""What tests/stand_in/test_tuning.py runs on its ranks: TRL's trainers and PEFT, alone (then they
use DDP) and with a ds_config through the stand-in. Nothing here knows zero_trial but the first
import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zero_trial.as_deepspeed  # noqa: F401  isort: skip

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.stand_in.samples import LENGTH, VOCABULARY
from tests.stand_in.trainers import arguments, ds_config, logged, pretrained

disable_progress_bars()
transformers.utils.logging.disable_progress_bar()

WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of as many words as the models of tests/stand_in/trainers.py know."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def texts(size: int = 120) -> list[list[str]]:
    """Return sentences that count upwards in steps of 1 to 3, of 6 to 12 words."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(size):
        start, step, more = (int(torch.randint(0, high, (), generator=generator)) for high in (60, 3, 7))
        found.append([WORDS[(start + (step + 1) * at) % len(WORDS)] for at in range(6 + more)])
    return found


def dataset(kind: str) -> Dataset:
    """Return what SFT, DPO or GRPO trains on."""
    said = texts()
    prompts = [" ".join(words[:3]) for words in said]
    if kind == "SFT":
        return Dataset.from_dict({"text": [" ".join(words) for words in said]})
    if kind == "GRPO":
        return Dataset.from_dict({"prompt": prompts})
    right = [" " + " ".join(words[3:]) for words in said]
    wrong = [" " + " ".join(reversed(words[2:])) for words in said]
    return Dataset.from_dict({"prompt": prompts, "chosen": right, "rejected": wrong})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of even words in each completion."""
    found = [[int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(evens) / max(len(evens), 1) for evens in found]


TRAINERS: dict[str, tuple[Any, Any]] = {
    "SFT": (SFTTrainer, SFTConfig),
    "DPO": (DPOTrainer, DPOConfig),
    "GRPO": (GRPOTrainer, GRPOConfig),
}


def tuned(
    kind: str,
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    family: str = "Llama",
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train with a trainer of TRL. ``given``: its further arguments."""
    cls, args_cls = TRAINERS[kind]
    own = {"GRPO": {"max_completion_length": 6, "num_generations": 3, "top_k": 5}, "SFT": {"max_length": LENGTH}}
    common = {"max_steps": 12, "bf16": False, "activation_checkpointing": False, **own.get(kind, {})}
    args = arguments(folder / "out", args_cls, deepspeed=config, **common | options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / family)
    more = {"reward_funcs": reward} if kind == "GRPO" else {}
    trainer = cls(
        model=model, args=args, train_dataset=dataset(kind), processing_class=tokenizer(), **more, **given or {}
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


# --- what the tests ask ---------------------------------------------------------------------------


def losses(kind: str, folder: Path, stages: list[int | None], **options: Any) -> list[list[float]]:
    """Return the losses of each run; stage None is the trainer alone, under DDP."""
    pretrained(options.get("family", "Llama"), folder)
    configs = [None if stage is None else ds_config(stage) for stage in stages]
    if options.pop("adapters", False):
        options["given"] = {"peft_config": LoraConfig(**LORA)}
    return [logged(tuned(kind, folder, config, **options), "loss") for config in configs]
