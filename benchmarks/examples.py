"""Public examples of DeepSpeed and Determined, their Python unchanged, trained here and by
upstream DeepSpeed: the losses of 50 steps are compared.

python benchmarks/examples.py --deepspeed-examples FOLDER --determined-examples FOLDER
python benchmarks/examples.py ... --peer-python VENV/bin/python   # which has upstream deepspeed
python benchmarks/examples.py ... --only cifar gan
python benchmarks/examples.py --list   # quick

The folders are clones of github.com/deepspeedai/DeepSpeedExamples and of examples/deepspeed of
github.com/determined-ai/determined (the last commit with all examples is ea8d7602d8^). Without
--peer-python the examples are trained here alone. ``examples_worker.py`` has the stand-ins for
data and CUDA. Exits with 1 if an example fails, or if losses differ by more than 1e-5 although two
runs of the peer do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.processes import free_port, run
from benchmarks.record import Column, save

TOLERANCE = 1e-5
WORKER = Path(__file__).with_name("examples_worker.py")


# eps as large as this keeps Adam from turning one rounding of a gradient near 0 into a whole step
def _adam(lr: float) -> dict[str, Any]:
    """Return the optimizer of a ds_config. DeepSpeed's Adam has a weight decay of 0.01 unless it is
    given."""
    return {
        "type": "Adam",
        "params": {"lr": lr, "betas": [0.5, 0.999], "eps": 1e-4, "weight_decay": 0, "torch_adam": True},
    }


COLUMNS: list[Column] = [
    ("example", lambda row: row["example"]),
    ("ranks", lambda row: str(row["ranks"])),
    ("changed lines", lambda row: str(row["changed"])),
    ("losses", lambda row: str(row["losses"])),
    ("first, last", lambda row: f"{row['first']:.4f}, {row['last']:.4f}" if "first" in row else ""),
    ("peer", lambda row: row["peer"]),
    ("ours - peer", lambda row: _shown(row, "difference")),
    ("peer - peer nudged", lambda row: _shown(row, "control")),
    ("losses within 1e-5", lambda row: str(row.get("within", ""))),
    ("", lambda row: row.get("fault", "")),
]
NOTE = """Files of Python as they are fetched; data, batch sizes and widths (ds_config, YAML and arguments) are small.
The largest difference of any loss on any rank, over all steps, and how many losses come before the first that differs by
more than 1e-5. The nudged peer is the peer with every weight times 1 + 2^-23 at the start: what one rounding makes of the
example. HelloDeepSpeed trains in bf16 only, and between 8 and 16 one bf16 step of a loss is 0.0625. pipeline_parallelism
(AlexNet with dropout) trains with SGD: under Adam (lr 1e-5) 50 steps make 5.8e-4 of one rounding between two runs of DeepSpeed,
5.1e-4 between ours and DeepSpeed.

Determined's GANs take two backward() of the discriminator for one step(). DeepSpeed 0.19.8 refuses them at stage 0
(runtime/engine.py:3129: the generator's loss passes through the discriminator's engine), and at stages 1 and 2 only the
last backward() before the step counts (runtime/zero/stage_1_and_2.py:1047: with one micro-batch per step each backward() is
at the boundary and replaces averaged_gradients; of one linear layer the weights are then those of plain torch without the
first loss, to six digits). So their peer is plain torch as they are (gradients averaged over the ranks, torch's Adam), and
DeepSpeed where ds_config says managed_gradient_accumulation: false ("caller's boundary"), which adds both up."""


@dataclass(frozen=True)
class Example:
    """One example: its folder below a root, the program, and small settings in place of its own.

    Args:
        root: "deepspeed" or "determined".
        files: replace the files of these names, which are not Python.
        samples: size of the training data's stand-in.
        plain: the peer is plain torch.
    """

    name: str
    root: str
    folder: str
    program: str
    arguments: str = ""
    files: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    samples: int = 800
    most: int | None = None
    plain: bool = False


def _experiment(length: int, metric: str, **hyperparameters: Any) -> dict[str, Any]:
    return {
        "name": "example",
        "entrypoint": "python3 -m determined.launch.deepspeed --trial model_def:Trial",
        "hyperparameters": {"deepspeed_config": "ds_config.json", **hyperparameters},
        "data": {"dataroot": ".", "dataset": "mnist", "image_size": 64},
        "searcher": {"name": "single", "metric": metric, "max_length": {"batches": length}},
        "checkpoint_policy": "none",
        "min_validation_period": {"batches": length},
    }


_GAN = {"noise_length": 16, "generator_width_base": 8, "discriminator_width_base": 8, "data_workers": 0}
_GAN_CONFIG = {
    "train_batch_size": 16,
    "gradient_clipping": 0,
    "optimizer": _adam(1e-5),
    "zero_optimization": {"stage": 1},
}
_CALLERS = {**_GAN_CONFIG, "managed_gradient_accumulation": False, "optimizer": _adam(1e-6)}
_PIPE = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}
_MOE = {"moe": False, "moe_param_group": False, "overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}}}

EXAMPLES = [
    Example(
        "HelloDeepSpeed",
        "deepspeed",
        "training/HelloDeepSpeed",
        "train_bert_ds.py",
        "--checkpoint_dir experiments --tokenizer TOKENIZER --num_iterations 51 --local_rank LOCAL_RANK",
    ),
    *(
        Example(
            f"cifar, ZeRO-{stage}",
            "deepspeed",
            "training/cifar",
            "cifar10_deepspeed.py",
            f"--dtype fp32 --stage {stage} --epochs 1 --log-interval 10 --local_rank LOCAL_RANK",
        )
        for stage in range(4)
    ),
    Example(
        "pipeline_parallelism",
        "deepspeed",
        "training/pipeline_parallelism",
        "train.py",
        "--deepspeed_config ds_config.json -p 2 --steps 50 --backend gloo --local_rank LOCAL_RANK",
        {"ds_config.json": _PIPE},
    ),
    Example(
        "gan",
        "deepspeed",
        "training/gan",
        "gan_deepspeed_train.py",
        "--dataset fake --cuda --deepspeed_config gan_deepspeed_config.json --batchSize 8 --workers 0 --ngf 8 --ndf 8 "
        "--local_rank LOCAL_RANK",
        {"gan_deepspeed_config.json": {"train_batch_size": 16, "gradient_clipping": 0, "optimizer": _adam(1e-4)}},
        samples=400,
    ),
    Example(
        "Determined's dcgan",
        "determined",
        "dcgan",
        "trainer.py",
        files={
            "ds_config.json": _GAN_CONFIG,
            "mnist.yaml": _experiment(50, "no_validation_metric", **_GAN),
        },
        most=150,
        plain=True,
    ),
    Example(
        "Determined's deepspeed_dcgan",
        "determined",
        "deepspeed_dcgan",
        "model_def:DCGANTrial",
        files={
            "ds_config.json": _GAN_CONFIG,
            "example.yaml": _experiment(50, "no_validation_metric", **_GAN),
        },
        plain=True,
    ),
    Example(
        "Determined's dcgan, caller's boundary",
        "determined",
        "dcgan",
        "trainer.py",
        files={
            "ds_config.json": _CALLERS,
            "mnist.yaml": _experiment(50, "no_validation_metric", **_GAN),
        },
        most=150,
    ),
    Example(
        "Determined's deepspeed_dcgan, caller's boundary",
        "determined",
        "deepspeed_dcgan",
        "model_def:DCGANTrial",
        files={
            "ds_config.json": _CALLERS,
            "example.yaml": _experiment(50, "no_validation_metric", **_GAN),
        },
    ),
    Example(
        "Determined's cifar10",
        "determined",
        "cifar10_moe",
        "model_def:CIFARTrial",
        files={
            "ds_config.json": {"train_batch_size": 16, "optimizer": _adam(1e-4)},
            "example.yaml": _experiment(50, "accuracy", **_MOE),
        },
    ),
    Example(
        "Determined's pipeline_parallelism",
        "determined",
        "pipeline_parallelism",
        "model_def:CIFARTrial",
        files={
            "ds_config.json": _PIPE,
            "example.yaml": _experiment(50, "loss", pipe_parallel_size=2, part="parameters"),
        },
    ),
]


def _shown(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _tokenizer(folder: Path, python: str) -> None:
    """Write a small tokenizer with the five special tokens of RoBERTa: there is no network."""
    code = (
        "import sys; from tokenizers import Tokenizer, models, pre_tokenizers; from transformers import PreTrainedTokenizerFast;"
        "special = ['<s>', '<pad>', '</s>', '<unk>', '<mask>'];"
        "vocabulary = {word: number for number, word in enumerate([*special, *map(chr, range(97, 123))])};"
        "t = Tokenizer(models.WordPiece(vocabulary, unk_token='<unk>', continuing_subword_prefix=''));"
        "t.pre_tokenizer = pre_tokenizers.Whitespace();"
        "PreTrainedTokenizerFast(tokenizer_object=t, bos_token='<s>', pad_token='<pad>', eos_token='</s>', unk_token='<unk>',"
        "mask_token='<mask>').save_pretrained(sys.argv[1])"
    )
    done = run([python, "-c", code, str(folder)], 300)
    if done.code != 0:
        raise SystemExit(done.why())


def _train(example: Example, source: Path, work: Path, python: str, side: str) -> list[list[Any]] | str:
    """Copy the example, train it, and return the losses of each rank, or why there are none."""
    folder = work / side
    shutil.copytree(source, folder)
    for name, content in example.files.items():
        (folder / name).write_text(json.dumps(content))
    words = [str(WORKER), "--losses", str(work / f"{side}.json"), "--folder", str(folder)]
    words += [] if side == "ours" else ["--plain"] if example.plain else ["--peer"]
    words += ["--nudge"] if side == "control" else []
    words += ["--as-determined"] if example.root == "determined" else []
    words += ["--most", str(example.most)] if example.most is not None else []
    if ":" in example.program:
        options = ["--run-dir", str(work / f"{side}_run"), "--experiment", str(folder / "example.yaml")]
        words += [example.program, *options, "--model-dir", str(folder)]
    else:
        words += [
            str(folder / example.program),
            *example.arguments.replace("TOKENIZER", str(work / "tokenizer")).split(),
        ]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(example.ranks), "--master-port", str(free_port())]
    env = {"EXAMPLES_SAMPLES": str(example.samples), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = run([python, *launch, *words], 1500, env)
    if done.code != 0:
        (work / f"{side}.log").write_text(done.said)
        print(done.said[-3000:], file=sys.stderr)
        return f"{side} {done.why()}"
    return [json.loads((work / f"{side}.json.{rank}").read_text()) for rank in range(example.ranks)]


def _difference(one: list[list[Any]], other: list[list[Any]]) -> float | None:
    """Return the largest difference of two losses; None if they come from different engines."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=False)]
    same = [len(a) for a in one] == [len(b) for b in other] and all(x[0] == y[0] for x, y in pairs)
    return max(abs(x[1] - y[1]) for x, y in pairs) if same and pairs else None


def _within(one: list[list[Any]], other: list[list[Any]]) -> int:
    """Count the losses before the first one that differs by more than the tolerance on a rank."""
    steps = zip(*(zip(a, b, strict=True) for a, b in zip(one, other, strict=True)), strict=True)
    far = (number for number, pairs in enumerate(steps) if any(abs(x[1] - y[1]) > TOLERANCE for x, y in pairs))
    return next(far, len(one[0]))


def _changed_lines(source: Path, copy: Path) -> int:
    """Count the lines of Python that differ between the example and what was run."""
    pairs = [(path.read_text(), (copy / path.relative_to(source)).read_text()) for path in source.rglob("*.py")]
    return sum(a != b for x, y in pairs for a, b in zip(x.splitlines(), y.splitlines(), strict=True))


def measure(example: Example, source: Path, work: Path, peer: str | None) -> dict[str, Any]:
    """Return the row of one example."""
    if "TOKENIZER" in example.arguments:
        _tokenizer(work / "tokenizer", sys.executable)
    row: dict[str, Any] = {"example": example.name, "ranks": example.ranks, "changed": "", "losses": 0, "peer": ""}
    ours = _train(example, source, work, sys.executable, "ours")
    if isinstance(ours, str):
        return row | {"fault": ours}
    row |= {"changed": _changed_lines(source, work / "ours"), "losses": len(ours[0])}
    row |= {"first": ours[0][0][1], "last": ours[0][-1][1]}
    peer = sys.executable if example.plain else peer
    if peer is None:
        return row
    row["peer"] = "plain torch" if example.plain else "DeepSpeed 0.19.8"
    theirs, control = (_train(example, source, work, peer, side) for side in ("peer", "control"))
    for key, other in (("difference", ours), ("control", control)):
        if isinstance(theirs, str) or isinstance(other, str):
            return row | {"fault": theirs if isinstance(theirs, str) else str(other)}
        row[key] = _difference(theirs, other)
    if row["difference"] is None:
        return row | {"fault": "not the same losses"}
    row["within"] = _within(theirs, ours)
    if row["difference"] > max(TOLERANCE, row["control"] or 0):
        row["fault"] = "DIFFERENT"
    return row


def main() -> int:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-examples", type=Path, help="a clone of DeepSpeedExamples")
    parser.add_argument("--determined-examples", type=Path, action="append", default=[], help="examples/deepspeed")
    parser.add_argument("--peer-python", help="a Python with deepspeed==0.19.8, transformers and determined")
    parser.add_argument("--only", nargs="+", default=[], help="examples whose names begin so")
    parser.add_argument("--list", action="store_true", help="name the examples and end")
    parser.add_argument("--name", default="examples", help="of the files in benchmarks/results")
    args = parser.parse_args()
    chosen = [item for item in EXAMPLES if not args.only or item.name.startswith(tuple(args.only))]
    if args.list:
        print("\n".join(item.name for item in chosen))
        return 0
    roots = {"deepspeed": [args.deepspeed_examples] if args.deepspeed_examples else []}
    roots["determined"] = args.determined_examples
    rows = []
    for item in chosen:
        source = next((root / item.folder for root in roots[item.root] if (root / item.folder).is_dir()), None)
        if source is None:
            print(f"left out: {item.name}, since there is no folder {item.folder}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as work:
            rows.append(measure(item, source.resolve(), Path(work), args.peer_python))
        print(json.dumps(rows[-1]), flush=True)
    if not rows:
        parser.error("there is nothing to train: give the folders of the examples")
    save(args.name, {"tolerance": TOLERANCE, "cores": os.cpu_count()}, rows, COLUMNS, NOTE)
    return 1 if any("fault" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
