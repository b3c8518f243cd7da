"""The models that the engine's benchmarks train, and the engines that they compare.

A workload is a model and its batches, the same for every contender and a function of the seed. A
contender turns a model into one function that does a whole optimizer step.

All use AdamW with the same hyperparameters and clip the global norm to 1. Names: ``bare`` (forward
and backward only, nothing exchanged), ``ddp``, ``fsdp2``, ``deepspeed-N`` and ``ours-N`` for ZeRO
stage N. ``-default`` behind the last two leaves bucket sizes and the persistence threshold as that
engine ships them; otherwise buckets are as large as the model and stage 3 shards every parameter,
on both sides. ``-none`` is set_grads_to_none; ``-16bit`` keeps bf16 gradients in bf16, where both
otherwise sum them in fp32.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED = 7
BLOCK = 10  # tiny layers per block
GRADS_TO_NONE = "none"  # options of a contender
GRADS_IN_MODEL_DTYPE = "16bit"


@dataclass(frozen=True)
class Workload:
    """``model``: "gpt", "tiny" or "qlora"; sizes below are read by the one that has them."""

    model: str
    micro_batch: int
    sequence: int = 64
    layers: int = 6
    width: int = 384
    storage: str = "uint8"  # dtype that packed 4-bit weights claim to have

    def build(self) -> nn.Module:
        if self.model == "tiny":
            return TinyLayers(self.layers, self.width)
        if self.model == "qlora":
            from benchmarks.qlora import QLoRA  # it needs transformers, PEFT and bitsandbytes

            torch.manual_seed(SEED)
            return QLoRA(self.layers, self.width, self.storage)
        gpt = _gpt_module()
        heads = max(1, self.width // 64)
        config = gpt.GPTConfig(sequence=self.sequence, layers=self.layers, heads=heads, width=self.width)
        return gpt.GPT(config, seed=SEED)

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return micro-batch ``step`` of rank ``rank``: random numbers from a fixed seed."""
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        if self.model == "tiny":
            return (
                torch.randn(self.micro_batch, self.width, generator=generator),
                torch.randn(self.micro_batch, self.width, generator=generator),
            )
        window = torch.randint(0, 64, (self.micro_batch, self.sequence + 1), generator=generator)
        return window[:, :-1], window[:, 1:]


class TinyBlock(nn.Module):
    """A few small linear layers in a row: what an engine may treat as one unit."""

    def __init__(self, layers: int, width: int, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x


class TinyLayers(nn.Module):
    """``layers`` small linear layers in blocks of ``BLOCK``: two parameter tensors each, next to no
    arithmetic."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        sizes = [min(BLOCK, layers - start) for start in range(0, layers, BLOCK)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.blocks = nn.ModuleList(TinyBlock(size, width, 1.0 / layers) for size in sizes)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()


def _gpt_module() -> ModuleType:
    path = Path(__file__).parents[1] / "model_defs" / "gpt" / "model.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpt", path)
    if spec is None or spec.loader is None:
        raise RuntimeError("model_defs/gpt/model.py cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.01, 1.0

Batches = list[tuple[Tensor, Tensor]]
# one optimizer step over accumulation micro-batches -> mean loss
Step = Callable[[Batches], Tensor]


def missing(name: str, dtype: str = "fp32") -> str | None:
    """Return why this contender cannot run here, or None."""
    if dtype == "fp16" and not name.startswith(("ours", "deepspeed", "before")):
        return "nothing here scales its loss"
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install 'zero_trial[bench]')"
    if name == "fsdp2" and not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
        return f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard"
    return None


def prepare(name: str, model: nn.Module, dtype: str, micro_batch: int, accumulation: int) -> tuple[Step, list[Any]]:
    """Return the step function of contender ``name`` and the objects it needs alive. Collective."""
    kind, _, variant = name.partition("-")
    if kind == "bare":
        return bare(model, dtype), [model]
    if kind == "ddp":
        return ddp(model, dtype, accumulation)
    if kind == "fsdp2":
        return fsdp2(model, dtype, accumulation)
    stage, *options = variant.split("-")
    numel, trained = (
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or frozen)
        for frozen in (True, False)
    )
    config = ds_config(int(stage), dtype, micro_batch, accumulation, None if "default" in options else numel)
    if "default" not in options:  # DeepSpeed keeps a buffer of this size
        config["zero_optimization"]["reduce_bucket_size"] = trained
    if GRADS_TO_NONE in options:
        config["zero_optimization"]["set_grads_to_none"] = True
    if GRADS_IN_MODEL_DTYPE in options:
        config.pop("data_types", None)
    return zero_engine(kind, model, config)


def bare(model: nn.Module, dtype: str) -> Step:
    """Return forward and backward of a plain model, which every engine has to do as well."""
    if dtype == "bf16":
        model.bfloat16()

    def step(batches: Batches) -> Tensor:
        model.zero_grad(set_to_none=True)
        return _accumulate(model, lambda loss: loss.backward(), batches, dtype)

    return step


def ddp(model: nn.Module, dtype: str, accumulation: int) -> tuple[Step, list[Any]]:
    """DistributedDataParallel and torch's fused AdamW; bf16 by autocast over fp32 weights, as DDP
    users do it."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step(batches: Batches) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            with wrapped.no_sync():
                total = _accumulate(wrapped, lambda loss: loss.backward(), batches[:-1], "fp32", len(batches))
            last = _accumulate(wrapped, lambda loss: loss.backward(), batches[-1:], "fp32", len(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return total + last

    return step, [wrapped, optimizer]


def fsdp2(model: nn.Module, dtype: str, accumulation: int) -> tuple[Step, list[Any]]:
    """fully_shard on every block and the root, fused AdamW on the shards; bf16 by its mixed
    precision policy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step(batches: Batches) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)  # type: ignore[operator]
            total = total + _accumulate(model, lambda loss: loss.backward(), [batch], "fp32", len(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return total

    return step, [model, optimizer]


def ds_config(stage: int, dtype: str, micro_batch: int, accumulation: int, bucket: int | None) -> dict[str, Any]:
    """Return one configuration for both ZeRO engines. ``bucket``: elements, or None for the
    engine's own defaults."""
    optimizer = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    zero: dict[str, Any] = {"stage": stage}
    if bucket is not None:
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}
        zero |= {"stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": zero,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True}
    return config


def zero_engine(kind: str, model: nn.Module, config: dict[str, Any]) -> tuple[Step, list[Any]]:
    """DeepSpeed or zero_trial: the same three calls."""
    if kind == "deepspeed":
        import deepspeed as library
    else:
        import zero_trial as library  # type: ignore[no-redef]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = library.initialize(model=model, model_parameters=trained, config=config)

    def step(batches: Batches) -> Tensor:
        total = torch.zeros(())
        for inputs, targets in batches:
            loss = engine(_cast(inputs, config), _cast(targets, config))
            engine.backward(loss)
            engine.step()
            total = total + loss.detach().float()
        return total / len(batches)

    return step, [engine]


def _cast(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.bfloat16() if "bf16" in config else tensor.half() if "fp16" in config else tensor


def _accumulate(
    model: nn.Module, backward: Callable[[Tensor], Any], batches: Batches, dtype: str, parts: int | None = None
) -> Tensor:
    parts = len(batches) if parts is None else parts
    total = torch.zeros(())
    for inputs, targets in batches:
        if dtype == "bf16" and inputs.is_floating_point():
            inputs, targets = inputs.bfloat16(), targets.bfloat16()
        loss = model(inputs, targets) / parts
        backward(loss)
        total = total + loss.detach().float()
    return total
