"""The model of ``engine.py --model qlora``: a frozen Llama in 4 bits (bitsandbytes) under LoRA
adapters (PEFT), as transformers loads it."""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


class QLoRA(nn.Module):
    """A base with random weights in NF4 with double quantization; adapters on every linear layer
    but the head. ``storage``: the dtype that the packed bytes claim to have."""

    def __init__(self, layers: int, width: int, storage: str, vocabulary: int = 1000) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 64),
        )
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_storage=storage,
        )
        with tempfile.TemporaryDirectory() as folder:
            save_model(LlamaForCausalLM(config), f"{folder}/model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(folder)
            base = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, dtype=torch.float32)
        self.blocks = base.model.layers  # what FSDP2 wraps
        self.model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self.train()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
