"""What a real rank holds while it trains: the engine on gloo ranks, watched by LiveBytes; and the
small models that are planned for."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_trial
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.sharding.offload.update_store import UpdateStore

MODEL_DEFS = Path(__file__).parents[2] / "model_defs"
ROWS, LENGTH = 4, 32

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def model_module(folder: str) -> Any:
    """``model.py`` of a folder in model_defs/, under a name of its own."""
    name = f"planned_{folder}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, MODEL_DEFS / folder / "model.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def build(folder: str) -> nn.Module:
    """Return a small model; of "frozen gpt", which is wide, only biases and norms are trained."""
    module = model_module(folder.removeprefix("frozen "))
    if folder == "gpt":
        return module.GPT(module.GPTConfig(sequence=LENGTH, layers=2, width=64), seed=1)
    if folder == "frozen gpt":
        gpt: nn.Module = module.GPT(module.GPTConfig(sequence=LENGTH, layers=6, width=256), seed=1)
        for param in gpt.parameters():
            param.requires_grad_(param.dim() < 2)
        return gpt
    return module.MaskedLanguageModel(module.EncoderConfig(sequence=LENGTH, layers=2, width=64), seed=1)


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (rows, LENGTH), generator=generator), torch.randint(
        0, 256, (rows, LENGTH), generator=generator
    )


def ds_config(stage: int, *, bf16: bool = False, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": bf16},
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 1000},
        **more,
    }


def watched_step(folder: str, config: dict[str, Any], steps: int = 3) -> dict[str, int]:
    """Bytes of one rank: what the engine says that it keeps, and what really lived in the last
    step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    live, given = LiveBytes(), tuple(tensor.to(device) for tensor in batch())
    with live:
        model = build(folder)
        live.hold([*model.parameters(), *model.buffers(), *given])
        engine = zero_trial.initialize(model=model, config=config)[0]
        live.follow(engine.sharded.buffers)
        live.hold(engine.optimizer.store.buffers)
        # a hook of saved tensors holds views of frozen weights, which then keep their memory
        for watch in (*[nullcontext] * steps, live.saving):
            peak = live.peak
            live.restart()
            for _ in range(engine.gradient_accumulation_steps()):
                with watch():
                    engine.backward(engine(*given))
                    engine.step()
    found = {**engine.persistent_bytes(), "peak": peak, "activations": live.saved_peak, "live": live.live}
    regions = engine.optimizer.store.homes._regions if isinstance(engine.optimizer.store, UpdateStore) else ()
    found["disk"] = sum(file.end for region in regions for file in region._files)
    engine.destroy()
    return found
