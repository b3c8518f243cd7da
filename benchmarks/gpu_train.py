"""Train a GPT on one GPU in bf16, with this engine or plain torch and its fused AdamW; one
contender per process, its numbers as JSON.

    python benchmarks/gpu_train.py ours-1           # ours-<ZeRO stage> or torch; needs CUDA
    python benchmarks/gpu_train.py torch --dry-run  # quick: a tiny GPT on the CPU

Both keep fp32 masters and moments, compute in bf16, clip the norm to 1 and train on the same
batches: plain torch by autocast over fp32 weights, as its users do it. MFU counts 6 operations per
parameter and token and attention's products, against the dense bf16 peak of the GPU's data sheet; a
GPU without an entry here has no MFU. `of_products` is the same against what large bf16 matrix
products reach on this GPU. A time is that of a few whole steps from an idle GPU to an idle GPU,
updates included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import BETAS, CLIP, DECAY, EPS, LR, Workload, ds_config
from zero_trial.engine import profile

WARMUP, ROUNDS, STEPS = 4, 3, 5  # warmup steps; measured rounds, and steps in each
# masters, moments, gradients in fp32, two bf16 copies; activations
BYTES_PER_PARAMETER, SPARE = 26, 12 * 2**30
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT of 12 layers width^2 parameters."""

    layers: int
    width: int
    sequence: int
    micro_batch: int

    def build(self, device: torch.device) -> nn.Module:
        """Build the model on the device: a CPU takes longer to draw a billion numbers than the GPU
        to train on them."""
        work = Workload("gpt", self.micro_batch, self.sequence, self.layers, self.width)
        with device:
            return work.build().to(device)

    def flops_per_token(self, parameters: int) -> float:
        """Return operations of forward and backward: 6 per parameter, and for every layer the two
        products of causal attention, halved."""
        return 6.0 * parameters + 6.0 * self.layers * self.width * self.sequence


def size_for(device: torch.device) -> Size:
    """Return about 1 B parameters, or as many layers as fit into the GPU's free memory."""
    if device.type != "cuda":
        return Size(layers=2, width=64, sequence=32, micro_batch=2)
    free, _ = torch.cuda.mem_get_info(device)
    width = 2048
    most = int((free - SPARE) / BYTES_PER_PARAMETER / (12 * width * width))
    if most < 1:
        raise SystemExit(f"gpu_train.py: {free / 2**30:.0f} GiB of GPU memory are free, too few for one layer")
    return Size(layers=min(20, most), width=width, sequence=1024, micro_batch=8)


def ours(model: nn.Module, size: Size, stage: int) -> Step:
    """Return a step by initialize() and its three calls."""
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
    """Return a step by autocast, clip_grad_norm_ and torch's fused AdamW."""
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
    """Return bytes that repeat with a period, so that there is something to learn."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(0, 64, (size.micro_batch, 1), generator=generator)
    window = ((start + torch.arange(size.sequence + 1) * 7) % 64).to(device)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def timed(step: Step, batches: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, list[Tensor]]:
    """Return the seconds of these steps and their losses. The device is idle before the first and
    after the last."""
    wait(device)
    begin = time.perf_counter()
    losses = [step(*each) for each in batches]
    wait(device)
    return time.perf_counter() - begin, losses


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Train and return one row."""
    size = size_for(device)
    model = size.build(device)
    parameters = sum(p.numel() for p in model.parameters())
    step = plain(model, device) if name == "torch" else ours(model, size, int(name.rpartition("-")[2]))
    _, losses = timed(step, [batch(size, index, device) for index in range(WARMUP)], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for index in range(ROUNDS):
        begin = WARMUP + STEPS * index
        taken, found = timed(step, [batch(size, begin + i, device) for i in range(STEPS)], device)
        times.append(taken / STEPS)
        losses += found
    seconds, tokens = statistics.median(times), size.micro_batch * size.sequence
    row = {
        "name": name,
        "parameters": parameters,
        "layers": size.layers,
        "tokens_per_step": tokens,
        "ms": 1e3 * seconds,
        "ms_of_rounds": [1e3 * taken for taken in times],
        "tokens_per_second": tokens / seconds,
        "losses": [float(losses[0]), float(losses[-1])],
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return row | rates(size.flops_per_token(parameters) * tokens / seconds, device)


def rates(per_second: float, device: torch.device) -> dict[str, Any]:
    """Return model operations per second as a part of the data sheet's peak, if known, and of what
    matrix products reach here."""
    found: dict[str, Any] = {"tera_per_second": per_second / 1e12}
    sheet = profile.data_sheet(torch.cuda.get_device_name(device), torch.bfloat16) if device.type == "cuda" else None
    if sheet is not None:
        found |= {"mfu": per_second / sheet.per_second, "peak": sheet.per_second, "peak_source": sheet.source}
    products = profile.measure(device, torch.bfloat16)
    return found | {"of_products": per_second / products.per_second, "products_source": products.source}


def main() -> None:
    """Print one line of JSON."""
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
