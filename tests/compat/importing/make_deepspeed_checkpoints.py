"""Makes ``deepspeed_checkpoints.zip``: checkpoints of the real DeepSpeed, and the losses with which
DeepSpeed itself went on.

    PYTHONPATH=. DS_ACCELERATOR=cpu python tests/compat/importing/make_deepspeed_checkpoints.py

Run by hand, where DeepSpeed 0.19.8 can be imported; the tests read the file and need no DeepSpeed.
Takes about two minutes on two cores.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import torch

from tests.compat.importing.traveller import MORE, STEPS, Traveller, batch, ds_config, groups

CASES = [(0, "fp32", 2), (0, "bf16", 1), (1, "fp32", 2), (1, "bf16", 3)]
CASES += [(2, "fp32", 3), (2, "fp16", 2), (3, "fp32", 2), (3, "bf16", 3)]
UNIVERSAL = ("fp32-stage1-ranks2", "fp32-stage3-ranks2")
TARGET = Path(__file__).with_name("deepspeed_checkpoints.zip")
CLIENT = {"note": "five", "epoch": 3, "curve": torch.arange(3), "where": PurePosixPath("a/path")}


def name_of(stage: int, kind: str, ranks: int) -> str:
    return f"{kind}-stage{stage}-ranks{ranks}"


def train(stage: int, kind: str, out: str) -> None:
    """One rank: trains, saves, goes on, and writes the losses of going on."""
    import deepspeed

    logging.disable(logging.WARNING)
    # DeepSpeed refuses fp16 on CPUs; torch has had all that this model needs since 2.5
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = Traveller()
    config = ds_config(stage, kind)
    config["optimizer"]["params"]["torch_adam"] = True
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            engine.save_checkpoint(out, client_state=dict(CLIENT))
        loss = engine(*batch(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone().float()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if rank == 0:
        (Path(out) / "losses.json").write_text(json.dumps(losses[STEPS:]))


def main() -> None:
    """All cases, one after the other, into one archive."""
    with tempfile.TemporaryDirectory() as folder:
        for index, (stage, kind, ranks) in enumerate(CASES):
            out = Path(folder) / name_of(stage, kind, ranks)
            here = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            here["MASTER_PORT"] = str(29720 + index)
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, str(stage), kind, str(out)],
                    env={**here, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                )
                for rank in range(ranks)
            ]
            if any(process.wait(timeout=300) for process in processes):
                sys.exit(f"{out.name} failed")
            if out.name in UNIVERSAL:
                command = f"{sys.executable} -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --num_extract_workers 1"
                target = Path(folder) / f"{out.name}-universal"
                source = out / f"global_step{STEPS}"
                words = ["--num_merge_workers", "1", "--input_folder", str(source)]
                words += ["--output_folder", str(target / "universal")]
                subprocess.run([*command.split(), *words], check=True, timeout=300)
                (target / "losses.json").write_text((out / "losses.json").read_text())
        pack(Path(folder))


def pack(folder: Path) -> None:
    """Everything but DeepSpeed's scripts; refused if the name of this machine's folders has got
    into a file."""
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"):
            content = path.read_bytes()
            if any(word.encode() in content for word in (str(folder), str(Path.home()), os.getcwd())):
                sys.exit(f"{path} holds a path of this machine")
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(folder))), content, zipfile.ZIP_DEFLATED)
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2], sys.argv[3]) if len(sys.argv) == 4 else main()
