"""Long samples: bytes and time of the loss without logits and of tiled MLPs, and of the plain ones.

python benchmarks/long_samples.py
python benchmarks/long_samples.py --vocabulary 2000 --rounds 1 --hidden 64  # quick

Peaks are bytes of live tensors in addition to the arguments, counted at each operation of a forward
and backward without values. Times are CPU seconds of one thread for the same forward and
backward, in alternating order: medians over the rounds. The plain loss of 32 k tokens needs 47 GiB,
so its time is measured at --tokens.
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import Column, number, save
from zero_trial import chunked_cross_entropy, long_samples
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.planner import Planner, model_subject
from zero_trial.planning.state_bytes import TrainedModel

LONG = 1 << 15  # tokens
NOTE = """Bytes of live tensors at the peak of a forward and backward, in addition to its arguments (of the last rows: what
`zero-trial plan` finds for a GPU, states included), and CPU seconds of one thread. Ours is `chunked_cross_entropy` for a loss and
`long_samples` for a model; "RSS" is by how much the process grew while it computed ours."""
COLUMNS: list[Column] = [
    ("what", lambda row: row["what"]),
    ("plain MiB", number("plain_mib")),
    ("ours MiB", number("ours_mib")),
    ("plain / ours", number("less")),
    ("plain s", number("plain_s", 2)),
    ("ours s", number("ours_s", 2)),
    ("ours / plain", number("ratio", 2)),
    ("RSS MiB", number("rss_mib", 0)),
]
Loss = Callable[..., torch.Tensor]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [loss_row(LONG, args.hidden[0], args.vocabulary, 0)]
    rows += [loss_row(args.tokens, hidden, args.vocabulary, args.rounds) for hidden in args.hidden]
    rows += model_rows(args.tokens, args.rounds) + plan_rows()
    save("long_samples", vars(args), rows, COLUMNS, NOTE)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss with all logits."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def loss_row(tokens: int, width: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """Compare the losses; without rounds ours alone is computed, once."""
    peaks = [most_bytes(loss, tokens, width, vocabulary) / 2**20 for loss in (plain, chunked_cross_entropy)]
    row = {"what": f"loss, {tokens} tokens, V = {vocabulary}, H = {width}", **compared("mib", "less", *peaks)}
    hidden, weight = (torch.randn(n, width, requires_grad=True) for n in (tokens, vocabulary))
    labels = torch.randint(vocabulary, (tokens,))

    def of(loss: Loss) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))

    if rounds:
        return row | compared("s", "ratio", *seconds([of(plain), of(chunked_cross_entropy)], rounds))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["ours_s"] = seconds([of(chunked_cross_entropy)], 1, warmup=0)[0]
    return row | {"rss_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def most_bytes(loss: Loss, tokens: int, width: int, vocabulary: int) -> int:
    """Return the bytes of a loss and its gradients in addition to the arguments, without values."""
    live = LiveBytes()
    with FakeTensorMode(), live:
        hidden, weight = (torch.empty(n, width, requires_grad=True) for n in (tokens, vocabulary))
        labels = torch.empty(tokens, dtype=torch.long)
        live.restart()
        start = live.live
        torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
    return live.peak - start


def model_rows(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Compare a small Llama with the same in chunks, and in chunks and tiles."""
    model = llama(
        vocab_size=32_000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
    )
    models = [model, *(long_samples(copy.deepcopy(model), tiles) for tiles in (1, 8))]
    words = torch.randint(32_000, (1, tokens))
    calls = [lambda each=each: each(input_ids=words, labels=words).loss.backward() for each in models]
    dense, *ours = seconds(calls, rounds)
    return [
        {"what": f"Llama, {tokens} tokens, V = 32000, tiles={tiles}", **compared("s", "ratio", dense, own)}
        for tiles, own in zip((1, 8), ours, strict=True)
    ]


def plan_rows() -> list[dict[str, Any]]:
    """Compare the planned peaks of Llama 3.2 1B's shape in bf16 at stage 3 on 8 GPUs."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 1 << 17}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    settings = read_ds_config(config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    words = torch.zeros(1, LONG, dtype=torch.long)
    peaks = []
    for tiles in (0, 1, 8):
        with torch.device("meta"):
            model = llama(tie_word_embeddings=True, **shape)
        model.gradient_checkpointing_enable()
        if tiles:
            long_samples(model, tiles)
        subject = model_subject(
            TrainedModel(Blueprint(model, device="cuda"), settings), {"input_ids": words, "labels": words}
        )
        peaks.append((Planner(subject, settings, 8).plan().figures.peak or 0) / 2**20)
    return [
        {"what": f"plan: Llama 3.2 1B, {LONG} tokens, tiles={tiles}", **compared("mib", "less", peaks[0], own)}
        for tiles, own in zip((1, 8), peaks[1:], strict=True)
    ]


def llama(**shape: Any) -> Any:
    """Return a Llama of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape)).train()


def seconds(calls: Sequence[Callable[[], Any]], rounds: int, warmup: int = 1) -> list[float]:
    """Return the median CPU seconds of each, in alternating order."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(-warmup, rounds):
        for call, own in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            own += [time.process_time() - start] * (turn >= 0)
    return [median(own) for own in times]


def compared(unit: str, ratio: str, theirs: float, ours: float) -> dict[str, float]:
    """Return both and their ratio: how many times less memory, or the part of the time."""
    return {f"plain_{unit}": theirs, f"ours_{unit}": ours, ratio: theirs / ours if unit == "mib" else ours / theirs}


if __name__ == "__main__":
    main()
