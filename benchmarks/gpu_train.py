"""Training a GPT on one GPU in bf16: this engine beside plain torch with its fused AdamW; one contender per process, its numbers as JSON.

    python benchmarks/gpu_train.py ours-1             # ours-<ZeRO stage> or torch; needs a CUDA device
    python benchmarks/gpu_train.py torch --dry-run    # a tiny GPT on the CPU: that the script works

Both keep fp32 masters and moments, compute in bf16, clip the norm to 1 and train on the same batches: plain torch by autocast over fp32
weights, as its users do it. MFU counts 6 operations per parameter and token and attention's products, against the GPU's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import BETAS, CLIP, DECAY, EPS, LR, ds_config
from benchmarks.workload import Workload
from zero_trial.engine.peaks import peak_of

WARMUP, STEPS = 4, 12
BYTES_PER_PARAMETER, SPARE = 26, 12 * 2**30  # masters, moments, gradients in fp32, two bf16 copies; activations
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT of 12 layers width^2 parameters."""

    layers: int
    width: int
    sequence: int
    micro_batch: int

    def build(self, device: torch.device) -> nn.Module:
        """On the device at once: a CPU takes longer to draw a billion numbers than the GPU to train on them."""
        work = Workload("gpt", self.micro_batch, self.sequence, self.layers, self.width)
        with device:
            return work.build().to(device)

    def flops_per_token(self, parameters: int) -> float:
        """Forward and backward: 6 per parameter, and for every layer the two products of causal attention, halved."""
        return 6.0 * parameters + 6.0 * self.layers * self.width * self.sequence


def size_for(device: torch.device) -> Size:
    """About 1 B parameters, or as many layers of it as fit beside other users of the GPU."""
    if device.type != "cuda":
        return Size(layers=2, width=64, sequence=32, micro_batch=2)
    free, _ = torch.cuda.mem_get_info(device)
    width = 2048
    most = int((free - SPARE) / BYTES_PER_PARAMETER / (12 * width * width))
    if most < 1:
        raise SystemExit(f"gpu_train.py: {free / 2**30:.0f} GiB of GPU memory are free, too few for one layer")
    return Size(layers=min(20, most), width=width, sequence=1024, micro_batch=8)


def ours(model: nn.Module, size: Size, stage: int) -> Step:
    """initialize() and its three calls."""
    import zero_trial

    config = ds_config(stage, "bf16", size.micro_batch, 1, None)
    engine = zero_trial.initialize(model=model, config=config)[0]

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def plain(model: nn.Module, device: torch.device) -> Step:
    """Autocast, clip_grad_norm_ and torch's fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step


def batch(size: Size, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes that repeat with a period, so that there is something to learn."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(0, 64, (size.micro_batch, 1), generator=generator)
    window = ((start + torch.arange(size.sequence + 1) * 7) % 64).to(device)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Trains and returns one row."""
    size = size_for(device)
    model = size.build(device)
    parameters = sum(p.numel() for p in model.parameters())
    step = plain(model, device) if name == "torch" else ours(model, size, int(name.rpartition("-")[2]))
    losses, times = [], []
    for index in range(WARMUP + STEPS):
        inputs = batch(size, index, device)
        begin = time.perf_counter()
        losses.append(float(step(*inputs)))  # waits for the loss, not for the update: that is in the next step's time
        times.append(time.perf_counter() - begin)
        if index == WARMUP - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(times[WARMUP:])
    per_second = size.micro_batch * size.sequence / seconds
    peak = peak_of(device, torch.bfloat16)
    row = {
        "name": name,
        "parameters": parameters,
        "tokens_per_step": size.micro_batch * size.sequence,
        "ms": 1e3 * seconds,
        "tokens_per_second": per_second,
        "mfu": per_second * size.flops_per_token(parameters) / peak.per_second,
        "peak_source": peak.source,
        "losses": [losses[0], losses[-1]],
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return row


def main() -> None:
    """Prints one line of JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("contender")
    options.add_argument("--dry-run", action="store_true")
    given = options.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("gpu_train.py: no CUDA device; --dry-run tries the script on the CPU")
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", torch.cuda.current_device())
    print(json.dumps(measure(given.contender, device)))


if __name__ == "__main__":
    main()
