"""What test_trainer.py runs on its ranks, too: TRL's trainers and PEFT, alone (then they use DDP)
and with a ds_config through the shim. Nothing here knows zero_trial but the first import."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import zero_trial.as_deepspeed  # noqa: F401  isort: skip

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast, PrinterCallback, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.compat.deepspeed.samples import LENGTH, VOCABULARY, Samples
from tests.compat.deepspeed.trainers import (
    arguments,
    ds_config,
    forget,
    load,
    loaded_dtype,
    logged,
    pretrained,
    require_peer,
    weights,
)
from zero_trial import long_samples

disable_progress_bars()
transformers.utils.logging.disable_progress_bar()

WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
FOUR_BITS = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of as many words as the models of trainers.py know."""
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
    four_bits: bool = False,
    tiles: int = 0,
    **options: Any,
) -> Any:
    """Train with a trainer of TRL. ``given``: its further arguments; ``tiles``: of long_samples."""
    cls, args_cls = TRAINERS[kind]
    own = {"GRPO": {"max_completion_length": 6, "num_generations": 3, "top_k": 5}, "SFT": {"max_length": LENGTH}}
    common = {"max_steps": 6, "bf16": False, "activation_checkpointing": False, **own.get(kind, {})}
    args = arguments(folder / "out", args_cls, deepspeed=config, **common | options)
    model = load(family, folder, loaded_dtype(config, options), **FOUR_BITS if four_bits else {})
    if tiles:
        long_samples(model, tiles)
    more = {"reward_funcs": reward} if kind == "GRPO" else {}
    trainer = cls(
        model=model, args=args, train_dataset=dataset(kind), processing_class=tokenizer(), **more, **given or {}
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    require_peer(trainer, config)
    return trainer


# --- what the tests ask ---------------------------------------------------------------------------


def losses(kind: str, folder: Path, stages: list[int | None], **options: Any) -> list[list[float]]:
    """Return the losses of each run; stage None is the trainer alone, under DDP."""
    pretrained(options.get("family", "Llama"), folder)
    configs = [None if stage is None else ds_config(stage) for stage in stages]
    if options.pop("adapters", False):
        options["given"] = {"peft_config": LoraConfig(**LORA)}
    return [logged(tuned(kind, folder, config, **options), "loss") for config in configs]


def adapted(
    folder: Path, stage: int | None, out: Path, more: dict[str, Any], *, four_bits: bool = False, **options: Any
) -> Trainer:
    """Train adapters with transformers' Trainer, and save them. Their B is random: at its usual
    zero A would get no gradient in the first step, and lost adapters would give the same logits."""
    config = None if stage is None else ds_config(stage)
    args = arguments(out, deepspeed=config, **{"max_steps": 6} | options)
    model = load("Llama", folder, loaded_dtype(config, options), **FOUR_BITS if four_bits else {})
    transformers.set_seed(11)
    model = get_peft_model(model, LoraConfig(**LORA | {"init_lora_weights": False} | more))
    trainer = Trainer(model=model, args=args, train_dataset=Samples("Llama"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    require_peer(trainer, args.deepspeed)
    trainer.save_model(str(out / "adapter"))
    dist.barrier()
    return trainer


def qlora(folder: Path, stages: list[int | None], **options: Any) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return the losses of transformers' Trainer, and the adapters that it has saved, on a base in
    4 bits."""
    pretrained("Llama", folder)
    found = []
    for stage in stages:
        run = adapted(folder, stage, folder / f"qlora{stage}", {}, four_bits=True, **options)
        found.append((logged(run, "loss"), load_file(folder / f"qlora{stage}/adapter/adapter_model.safetensors")))
    return found


def trained_further(folder: Path, more: dict[str, Any]) -> list[str]:
    """Save adapters of one stage of training, load them at stage 3 for the next, and name what has
    another value than in the file."""
    pretrained("Llama", folder)
    out = folder / "first stage"
    adapted(folder, None, out, more, max_steps=2)
    args = arguments(folder / "out", deepspeed=ds_config(3), max_steps=2)
    model = PeftModel.from_pretrained(load("Llama", folder), out / "adapter", is_trainable=True)
    found, file = weights(model), load_file(out / "adapter" / "adapter_model.safetensors")
    trainer = Trainer(model=model, args=args, train_dataset=Samples("Llama"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    require_peer(trainer, args.deepspeed)
    forget()
    saved = {
        name.replace(".modules_to_save.default", "").replace(".default", ""): value for name, value in found.items()
    }
    return [name for name, value in file.items() if not torch.equal(saved[name], value)]


def logits(model: Any) -> torch.Tensor:
    """Return what a model says of four samples."""
    model.eval()
    with torch.no_grad():
        inputs = torch.stack([Samples("Llama", 4)[at]["input_ids"] for at in range(4)])
        said: torch.Tensor = model(input_ids=inputs).logits
    return said


def lora(folder: Path, stages: list[int | None], more: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return each run's losses, the shapes in its adapter file, and how far the adapter, loaded in
    plain PEFT, is from the trained model; merged there; and merged where it was trained."""
    pretrained("Llama", folder)
    found = []
    for stage in stages:
        out = folder / f"lora{stage}"
        trainer = adapted(folder, stage, out, more, **options)
        trained = logits(trainer.model)
        forget()
        loaded = PeftModel.from_pretrained(load("Llama", folder).to(trained.dtype), out / "adapter")
        models = {"loaded": logits(loaded), "merged": logits(loaded.merge_and_unload())}
        with deepspeed.zero.GatheredParameters(list(trainer.model.parameters()), modifier_rank=0):
            models["merged here"] = logits(trainer.accelerator.unwrap_model(trainer.model).merge_and_unload())
        models["base"] = logits(load("Llama", folder).to(trained.dtype))
        file = load_file(out / "adapter" / "adapter_model.safetensors")
        found.append(
            {
                "losses": logged(trainer, "loss"),
                "shapes": {name: tuple(value.shape) for name, value in file.items()},
                "far": {name: (said - trained).abs().max().item() for name, said in models.items()},
            }
        )
    return found


def merged_for_a_server(folder: Path, stages: list[int], more: dict[str, Any]) -> list[tuple[bool, bool, float]]:
    """Train adapters and hand out merged weights. Return for each stage whether they have the names
    and bits of what PEFT merges from the saved adapter, whether the trained model's logits stay
    bit-identical, and how far those of the plain model are from them."""
    pretrained("Llama", folder)
    found = []
    for stage in stages:
        out = folder / f"handed{stage}"
        trainer = adapted(folder, stage, out, more)
        before = logits(trainer.model)
        engine: Any = trainer.model_wrapped
        handed = {name: value.clone() for name, value in engine.named_full_parameters(merge_lora=True)}
        same = torch.equal(logits(trainer.model), before)
        forget()
        merged = PeftModel.from_pretrained(load("Llama", folder), out / "adapter").merge_and_unload()
        expected = dict(merged.named_parameters())
        right = handed.keys() == expected.keys()
        right = right and all(torch.equal(value, handed[name]) for name, value in expected.items())
        plain = load("Llama", folder)
        plain.load_state_dict(handed)
        found.append((right, same, (logits(plain) - before).abs().max().item()))
        if stage == 3:  # a merge that is not ended would be lost
            with (
                pytest.raises(Exception, match="are lost"),
                deepspeed.zero.GatheredParameters(trainer.model),
            ):
                trainer.model.merge_adapter()
        engine.destroy()
    return found


class Server:
    """What TRL's client asks of vLLM: a plain model that loads weights by name and samples.
    ``late``: as the packed broadcast of vLLM does, read tensors when the iterator has gone on."""

    model: Any
    late: bool

    def __init__(self, **_: Any) -> None:
        """Take the address of a server."""

    def init_communicator(self, device: Any) -> None:
        """Do nothing: there is no group of processes."""

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        packed = [(name, value if self.late else value.clone()) for name, value in named_params]
        facts = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in packed]
        assert facts == metadata
        params = dict(self.model.named_parameters())
        assert params.keys() == {name for name, _ in packed}
        for name, value in packed:
            params[name].data.copy_(value)

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        completions, logprobs = [], []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(7)
            for prompt in [each for each in prompts for _ in range(n)]:
                said, scores = list(prompt), []
                for _ in range(max_tokens):
                    row = self.model(input_ids=torch.tensor([said])).logits[0, -1].log_softmax(-1)
                    said.append(int(torch.multinomial(row.exp(), 1)))
                    scores.append([row[said[-1]].item()])
                completions.append(said[len(prompt) :])
                logprobs.append(scores)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def with_a_server(folder: Path, stages: list[int | None], *, adapters: bool) -> list[tuple[list[float], list[float]]]:
    """Return GRPO's losses, and the smallest and largest factors between the probabilities of a
    sampled token on the server and in the trainer: 1 if both have the same weights."""
    pretrained("Llama", folder)
    Server.late, found = not adapters, []  # TRL takes adapters out of the tensors that it has sent
    options = {"given": {"peft_config": LoraConfig(**LORA | {"init_lora_weights": False})}} if adapters else {}
    names = mock.patch.multiple("trl.generation.vllm_generation", VLLMClient=Server, is_vllm_available=lambda: True)
    with names:
        for stage in stages:
            config = None if stage is None else ds_config(stage)
            forget()
            Server.model = load("Llama", folder)
            trainer = tuned(
                *("GRPO", folder, config), use_vllm=True, vllm_mode="server", top_k=0, learning_rate=3e-2, **options
            )
            ratios = [logged(trainer, f"sampling/importance_sampling_ratio/{name}") for name in ("min", "max")]
            found.append((logged(trainer, "loss"), [value for each in ratios for value in each]))
    return found
