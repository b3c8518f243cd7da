"""What test_quantized.py runs on its ranks: tiny models in 4 bits with LoRA adapters, as
transformers, bitsandbytes and PEFT make them, trained by plain torch and by an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig

import zero_trial
from zero_trial import zero
from zero_trial.sharding.quantized import is_opaque

VOCABULARY, STEPS, FEW, BATCH = 96, 20, 10, 4
ADAMW = {"lr": 5e-3, "weight_decay": 0.01, "eps": 1e-3}  # eps: gradients of rounding alone must not count
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ONE = {"num_hidden_layers": 1}  # where a second layer would show nothing more
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES | {"intermediate_size": 96}),
    "short": ("LlamaForCausalLM", SIZES | ONE | {"intermediate_size": 96}),
    "Qwen": ("Qwen2ForCausalLM", SIZES | ONE | {"intermediate_size": 96}),
    "Mixtral": (
        "MixtralForCausalLM",
        SIZES | ONE | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # so wide that the padding of shards and the tables of values do not count
    "wide": ("LlamaForCausalLM", SIZES | {"hidden_size": 512, "intermediate_size": 768}),
}


def base(family: str, folder: Path, **quantization: Any) -> Any:
    """Load a model with random weights in 4 bits, with double quantization."""
    kind, _ = FAMILIES[family]
    asked = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return getattr(transformers, kind).from_pretrained(
        folder / family,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, **asked | quantization),
        dtype=torch.float32,
    )


def write_weights(folder: Path, families: Sequence[str], seed: int = 0) -> None:
    for family in families:
        kind, sizes = FAMILIES[family]
        torch.manual_seed(seed)
        config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(**sizes)
        getattr(transformers, kind)(config).save_pretrained(folder / family)


def adapted(model: Any) -> PeftModel:
    """Add adapters to all linear layers. The engine's losses must not depend on who adds them."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian")
    model = get_peft_model(model, lora)
    model.train()
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, 12), generator=torch.Generator().manual_seed(step % 4))


def train_plain(model: Any, steps: int = STEPS) -> list[float]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    losses = []
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_of(model: Any, stage: int, config: dict[str, Any] | None = None, **zero_section: Any) -> Any:
    adamw = {"type": "AdamW", "params": ADAMW | {"torch_adam": True}}
    section = {"stage": stage, "param_persistence_threshold": 0, "module_granularity_threshold": 1}
    given = {"train_batch_size": BATCH, "optimizer": adamw, "gradient_clipping": 0.0} | (config or {})
    return zero_trial.initialize(model=model, config=given | {"zero_optimization": section | zero_section})[0]


def train(engine: Any, steps: Sequence[int] = range(STEPS)) -> list[float]:
    """Train, and return the loss of each whole batch."""
    losses = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        own = batch(step).chunk(ranks)[rank]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


# --- what the tests ask ---------------------------------------------------------------------------


def plain(family: str, folder: Path) -> list[float]:
    return train_plain(adapted(base(family, folder)))


def stages(family: str, folder: Path, chosen: Sequence[int], steps: int = FEW) -> list[list[float]]:
    return [train(engine_of(adapted(base(family, folder)), stage), range(steps)) for stage in chosen]


def storages(folder: Path) -> list[tuple[list[float], list[float]]]:
    """Losses at stage 0 and 3 for each dtype that the packed bytes may pretend to have, in fp32 and
    bf16 training."""
    found = []
    for config, dtype in product(({}, {"bf16": {"enabled": True}}), (torch.uint8, torch.bfloat16, torch.float32)):
        models = [adapted(base("short", folder, bnb_4bit_quant_storage=dtype)) for _ in range(2)]
        first, second = (train(engine_of(m, s, config), range(2)) for m, s in zip(models, (0, 3), strict=True))
        found.append((first, second))
    return found


def frozen_bytes(folder: Path, double: bool) -> tuple[float, int]:
    """Return the bytes of 4-bit weights and their states that live on this rank between steps, and
    how many weights there are."""
    engine = engine_of(adapted(base("wide", folder, bnb_4bit_use_double_quant=double)), 3)
    train(engine, [0])
    held: dict[int, float] = {}
    count = 0
    for group in engine.sharded.groups:  # in fp32 with norms and embeddings
        own = sum(param.numel() for param in group.params if is_opaque(param)) / group.layout.payload
        for each in (group.shard, group.full):
            held[each.untyped_storage()._cdata] = each.untyped_storage().nbytes() * own
    tensors: list[torch.Tensor] = []
    for module in engine.module.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            count += state.shape.numel()
            parts = [state, state.state2] if state.nested else [state]
            tensors += [each for part in parts for each in (part.code, part.offset) if each is not None]
    for tensor in tensors:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(held.values()), count


def kept_for_backward(folder: Path) -> tuple[int, int]:
    """Return the bytes of packed weights that live after a forward whose graph is kept, and of all
    of them."""
    engine = engine_of(adapted(base("wide", folder)), 3, max_live_parameters=0)
    loss = engine(input_ids=batch(0), labels=batch(0)).loss
    packed = [each for group in engine.sharded.groups for each in group.params if each.dtype == torch.uint8]
    sizes = {param.numel() for param in packed}
    found = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.dtype == torch.uint8 and each.numel() in sizes
    }
    engine.backward(loss)
    engine.step()
    return sum(found.values()), sum(param.numel() for param in packed)


def away(folder: Path, place: Path) -> list[list[float]]:
    """Losses at stages 2 and 3 with parameters and optimizer state in files."""
    device = {"device": "nvme", "nvme_path": str(place), "max_in_cpu": 0}
    sections = {"offload_param": device, "offload_optimizer": {"device": "nvme", "nvme_path": str(place)}}
    return [train(engine_of(adapted(base("short", folder)), stage, **sections), range(FEW)) for stage in (2, 3)]


def checkpointed(folder: Path, reentrant: bool) -> tuple[list[float], list[float]]:
    """Losses after prepare_model_for_kbit_training, with gradient checkpointing, of plain torch and
    at stage 3."""
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    models = [adapted(prepare_model_for_kbit_training(base("short", folder), **options)) for _ in range(2)]
    return train_plain(models[0], FEW), train(engine_of(models[1], 3), range(FEW))


@contextmanager
def most_whole(bound: list[int]) -> Iterator[None]:
    """Note the most bytes of packed weights that live at once in a loader's block."""
    make = bitsandbytes.nn.Params4bit._quantize

    def counted(self: Any, device: Any) -> Any:
        made = make(self, device)
        live = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if issubclass(type(each), bitsandbytes.nn.Params4bit) and not each.is_meta and each.bnb_quantized
        }
        bound[0] = max(bound[0], sum(live.values()))
        return made

    bitsandbytes.nn.Params4bit._quantize = counted
    try:
        yield
    finally:
        bitsandbytes.nn.Params4bit._quantize = make


def built_in_shards(folder: Path, config: dict[str, Any]) -> tuple[list[float], list[float], list[int]]:
    """Losses of a model that is loaded inside of zero.Init and of one that is not, and the most
    packed bytes that lived at once while each was loaded."""
    peaks, losses = [], []
    for enabled in (True, False):
        bound = [0]
        with most_whole(bound), zero.Init(enabled=enabled, config=config | {"train_batch_size": BATCH}):
            model = base("wide", folder)
        peaks.append(bound[0])
        losses.append(train(engine_of(adapted(model), 3, config), range(4)))
    return losses[0], losses[1], peaks


def saved(folder: Path, to: Path) -> list[float]:
    """Train, save with and without what is frozen in the middle, and return all losses."""
    engine = engine_of(adapted(base("short", folder)), 3)
    losses = train(engine, range(5))
    engine.save_checkpoint(to / "all")
    engine.save_checkpoint(to / "adapters", exclude_frozen_parameters=True)
    return losses + train(engine, range(5, FEW))


def resumed(folder: Path, to: Path, stage: int) -> list[float]:
    """Resume from a checkpoint, over a base of the weights in ``folder``."""
    engine = engine_of(adapted(base("short", folder)), stage)
    engine.load_checkpoint(to)
    return train(engine, range(5, FEW))


def merged(folder: Path, to: Path) -> dict[str, float]:
    """Return how far a model merged after training, an adapter that was saved, and a state dict are
    from those of plain torch."""
    reference, model = (adapted(base("short", folder)) for _ in range(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_plain(reference, 5)
    engine = engine_of(model, 3)
    train(engine, range(5))
    gaps = {"packed": float(sum(not torch.equal(value, before[name]) for name, value in model.state_dict().items()
                               if "lora" not in name)),
            "names": float(model.state_dict().keys() != before.keys())}  # fmt: skip
    with zero.GatheredParameters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(to / "adapter")
    dist.barrier()
    again = PeftModel.from_pretrained(base("short", folder), to / "adapter")
    engine.destroy(rank0_only=False)
    gaps["left"] = float(sum("." in name for module in model.modules() for name in module._parameters))
    # in training mode, or bitsandbytes packs the weights for inference
    logits = [each.train()(input_ids=batch(0)).logits for each in (reference, again)]
    gaps["adapter"] = float((logits[0] - logits[1]).abs().max())
    merged = [each.merge_and_unload().train()(input_ids=batch(0)).logits for each in (reference, again, model)]
    gaps["merged again"] = float((merged[0] - merged[1]).abs().max())
    gaps["merged"] = float((merged[1] - merged[2]).abs().max())
    return gaps


def evaluated(folder: Path) -> tuple[list[float], list[float]]:
    """Losses at stages 0 and 3 where the model is evaluated between steps, and gradients of the
    first adapters after it."""
    found = []
    for stage in (0, 3):
        engine = engine_of(adapted(base("short", folder)), stage)
        losses = train(engine, [0])
        engine.eval()
        with torch.no_grad():
            engine(input_ids=batch(1))
        engine.train()
        losses += train(engine, [1, 2])
        found.append(losses)
    return found[0], found[1]
