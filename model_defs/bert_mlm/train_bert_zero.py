"""The masked-language-model tutorial under zero_trial: what changes against train_bert.py is marked
with "zero:".

zero-trial launch --num_gpus 2 train_bert_zero.py --checkpoint_dir experiments --num_iterations 1000
--log_every 100
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from data import MaskedBytes
from torch.utils.data import DataLoader, DistributedSampler
from train_bert import add_arguments, build_model, endless, log

import zero_trial
from zero_trial.data import local_corpus


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config used unless --deepspeed_config names a file. DeepSpeed's "Adam" means
    AdamW mode; without decay they agree.
    """
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": args.lr}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": args.stage},
    }


def main() -> None:
    """Train, log and save, on as many ranks as were launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--stage", type=int, default=1, choices=range(4), help="ZeRO stage of the built-in ds_config")
    zero_trial.add_config_arguments(parser)  # zero: --deepspeed_config FILE
    args = parser.parse_args()
    # zero: before the first random number, so that a wrong launch fails early
    zero_trial.init_distributed()
    torch.manual_seed(args.seed)

    # zero: no .to(device) and no optimizer; both belong to the engine.
    model = build_model(args)
    config = None if args.deepspeed_config else ds_config(args)
    engine, *_ = zero_trial.initialize(args=args, model=model, model_parameters=model.parameters(), config=config)
    corpus = local_corpus(args.data, max_bytes=args.max_bytes)
    chief = engine.global_rank == 0
    if chief:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        print(f"data: {corpus.source}, {corpus.fingerprint}")
    dataset = MaskedBytes(corpus.train, args.sequence, args.seed)
    # zero: every rank reads its own share of each step's windows.
    sampler = DistributedSampler(dataset, engine.dp_world_size, engine.mpu.get_data_parallel_rank(), seed=args.seed)
    batches = endless(DataLoader(dataset, engine.train_micro_batch_size_per_gpu(), sampler=sampler))

    losses, count = torch.zeros((), device=engine.device), 0
    while engine.global_steps < args.num_iterations:
        tokens, targets = (tensor.to(engine.device) for tensor in next(batches))
        loss = engine(tokens, targets)
        engine.backward(loss)  # zero: instead of loss.backward()
        engine.step()  # zero: instead of optimizer.step() and zero_grad()
        losses, count = losses + loss.detach(), count + 1
        if engine.micro_steps % engine.gradient_accumulation_steps():
            continue
        step = engine.global_steps
        if chief and (step % args.log_every == 0 or step == args.num_iterations):
            log(args.checkpoint_dir, step, args.num_iterations, float(losses) / count)
            losses, count = torch.zeros_like(losses), 0
        if step == args.num_iterations or (args.checkpoint_every and step % args.checkpoint_every == 0):
            # zero: every rank writes its share.
            engine.save_checkpoint(save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step})
    zero_trial.destroy_distributed()  # zero: the ranks part in good order


if __name__ == "__main__":
    main()
