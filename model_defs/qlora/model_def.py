"""QLoRA on local text: a base in 4 bits by bitsandbytes, and adapters by PEFT."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext, zero
from zero_trial.data import ByteDataset, local_corpus, unigram_bits_per_byte

_MISSING = [
    name for name in ("transformers", "accelerate", "peft", "bitsandbytes") if not importlib.util.find_spec(name)
]
if _MISSING:
    sys.exit(f"model_defs/qlora needs {' and '.join(_MISSING)}: pip install transformers accelerate peft bitsandbytes")

from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training  # noqa: E402
from safetensors.torch import save_model  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402


def load_base(folder: Path) -> Any:
    """Load a model in 4 bits; no rank holds all of it at once."""
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    with zero.Init():
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, dtype=torch.float32)


class QLoRATrial(ZeroTrial):
    """Trains adapters on bytes of text. ``model.base`` is a folder with a model of 256 tokens; null
    makes a small Llama with random weights."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.corpus = local_corpus(data.get("source", "stdlib"), max_bytes=data.get("max_bytes"))
        shape = dict(hp.model)
        base, sequence = shape.pop("base"), shape.pop("sequence")
        self.train_data = ByteDataset(self.corpus.train, sequence)
        self.val_data = ByteDataset(self.corpus.val, sequence, data.get("validation_windows"))
        with TemporaryDirectory() as made:
            if base is None:
                torch.manual_seed(0)  # a base that every trial shares
                config = LlamaConfig(vocab_size=256, max_position_embeddings=sequence, **shape)
                save_model(LlamaForCausalLM(config), f"{made}/model.safetensors", metadata={"format": "pt"})
                config.save_pretrained(made)  # of models, transformers saves those of rank 0 alone
            model = load_base(Path(made if base is None else base))
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(context.get_trial_seed())
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", **hp.lora))
        self.engine = context.initialize(model=model)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.val_data, self.context.get_train_micro_batch_size_per_gpu())

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        inputs, _ = self.context.to_device(next(dataloader_iter))  # the model shifts the labels itself
        loss: torch.Tensor = self.engine(input_ids=inputs, labels=inputs).loss
        return loss

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self._loss(dataloader_iter)}

    def summary(self) -> dict[str, Any]:
        unigram = unigram_bits_per_byte(self.corpus.train, self.val_data.predicted_bytes())
        return {"unigram_bits_per_byte": unigram, "data": self.corpus.describe()}
