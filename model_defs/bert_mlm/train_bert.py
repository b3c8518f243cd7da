"""The masked-language-model tutorial in plain PyTorch, on one device; train_bert_zero.py is the
same under zero_trial.

python train_bert.py --checkpoint_dir experiments --num_iterations 1000 --log_every 100
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from data import VOCABULARY, MaskedBytes
from model import EncoderConfig, MaskedLanguageModel
from safetensors.torch import save_model
from torch.utils.data import DataLoader, DistributedSampler

from zero_trial.data import local_corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both scripts."""
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="folder for checkpoints and train_log.jsonl")
    parser.add_argument("--num_iterations", type=int, default=1000)
    parser.add_argument("--log_every", type=int, default=100)
    parser.add_argument("--checkpoint_every", type=int, default=0, help="0: only at the end")
    parser.add_argument("--local_rank", type=int, default=-1, help="index of the GPU, if one is used; set by launchers")
    parser.add_argument("--data", default="stdlib", help='"stdlib", a folder of text, or one text file')
    parser.add_argument("--max_bytes", type=int, default=None, help="use at most this much of the text")
    parser.add_argument("--batch_size", type=int, default=16, help="windows per step and device")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)


def build_model(args: argparse.Namespace) -> MaskedLanguageModel:
    """Build the model that the arguments describe."""
    sizes = {name: getattr(args, name) for name in ("sequence", "layers", "heads", "width", "dropout")}
    return MaskedLanguageModel(EncoderConfig(vocabulary=VOCABULARY, **sizes), seed=args.seed)


def endless(loader: DataLoader) -> Iterator[list[torch.Tensor]]:
    """Yield batches without end, epoch after epoch."""
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # another order in every epoch
        yield from loader


def log(folder: Path, step: int, total: int, nats: float) -> None:
    """Write one line on the screen and one in ``train_log.jsonl``; ``nats`` is the mean loss since
    the last call."""
    bits = nats / math.log(2)
    print(f"step {step}/{total}  loss {nats:.4f}  {bits:.4f} bits per masked byte", flush=True)
    with (folder / "train_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": nats, "bits_per_masked_byte": bits}) + "\n")


def main() -> None:
    """Train, log and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    device = torch.device("cuda", max(args.local_rank, 0)) if torch.cuda.is_available() else torch.device("cpu")
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    corpus = local_corpus(args.data, max_bytes=args.max_bytes)
    print(f"data: {corpus.source}, {corpus.fingerprint}")
    dataset = MaskedBytes(corpus.train, args.sequence, args.seed)
    batches = endless(DataLoader(dataset, args.batch_size, shuffle=True))

    model = build_model(args).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    losses = torch.zeros((), device=device)
    for step in range(1, args.num_iterations + 1):
        tokens, targets = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses += loss.detach()
        if step % args.log_every == 0 or step == args.num_iterations:
            log(args.checkpoint_dir, step, args.num_iterations, float(losses) / ((step - 1) % args.log_every + 1))
            losses.zero_()
        if step == args.num_iterations or (args.checkpoint_every and step % args.checkpoint_every == 0):
            save_model(model, str(args.checkpoint_dir / f"checkpoint.iter_{step}.safetensors"))


if __name__ == "__main__":
    main()
