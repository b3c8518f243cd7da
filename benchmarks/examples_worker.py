"""One rank of a public example, unchanged, with stand-ins for what a machine without network and
CUDA lacks. ``benchmarks/examples.py`` starts it.

The stand-ins are the same whichever engine trains: small packages in place of torchvision,
datasets, fire, loguru and sh, with random images and text; ``cuda`` means the CPU. Each loss that
an engine receives, and each mean that a pipeline returns, is written to FILE.<rank> as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import random
import runpy
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

Losses = list[tuple[int, float]]


class _EnoughSteps(SystemExit):
    """End the script after the steps that are compared."""


# --- data -----------------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    """Random images of ten classes, each with its own brightness so that there is something to
    learn. Accepts the arguments of torchvision's data sets."""

    shape = (3, 32, 32)

    def __init__(self, *args: Any, transform: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self._transform = transform
        self.shape = tuple(options.get("image_size", self.shape))
        self._length = int(os.environ["EXAMPLES_SAMPLES"]) if options.get("train", True) else 40

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= len(self):
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        label = index % 10
        image = torch.randint(0, 128, self.shape, generator=draw) + 12 * label
        image = image.to(torch.uint8)
        return (self._transform(image) if self._transform is not None else image), label


class Digits(Images):
    """The same with one channel."""

    shape = (1, 28, 28)


class _Compose:
    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self._transforms:
            image = transform(image)
        return image


class _ToTensor:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.float() / 255


class _Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self._mean, self._std = (torch.tensor(value).view(-1, 1, 1) for value in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self._mean) / self._std


class _Resize:
    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        size = (self._size, self._size)
        return torch.nn.functional.interpolate(image[None].float(), size, mode="nearest")[0].to(image.dtype)


class _CenterCrop:
    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        top, left = ((length - self._size) // 2 for length in image.shape[-2:])
        return image[..., top : top + self._size, left : left + self._size]


def _alexnet(*args: Any, **options: Any) -> Any:
    """Return the AlexNet in the example's folder, which is a copy of torchvision's."""
    import alexnet

    return alexnet.AlexNet(*args, **options)


def _save_image(tensor: torch.Tensor, path: str, **options: Any) -> None:
    Path(path).write_bytes(tensor.detach().numpy().tobytes())


class Records(list[Any]):
    """A data set of ``datasets``: a list of records with ``filter`` and ``map``."""

    def filter(self, keep: Callable[[Any], bool]) -> Records:
        return Records(record for record in self if keep(record))

    def map(self, change: Callable[[Any], Any]) -> Records:
        return Records(change(record) for record in self)


def _load_dataset(*names: str, split: str) -> Records:
    draw = random.Random(1)
    words = ["the", "model", "trains", "on", "ranks", "that", "share", "their", "state", "of", "sharded", "weights"]
    count = int(os.environ["EXAMPLES_SAMPLES"])
    return Records({"text": " ".join(draw.choices(words, k=draw.randint(8, 24))) + "\n"} for _ in range(count))


# --- programs -------------------------------------------------------------------------------------


class _NoRepository(Exception):
    """Raised by ``sh`` if a command fails."""


class _Git:
    """``sh.git``: there is no repository around the example."""

    def __getattr__(self, name: str) -> Any:
        def command(*words: str, **options: Any) -> Any:
            raise sys.modules["sh"].ErrorReturnCode_128 if name == "log" else sys.modules["sh"].ErrorReturnCode_129

        return command


def _fire(function: Callable[..., Any]) -> Any:
    """Call ``function`` with ``--name value`` of the command line, read as its defaults are."""
    parser = argparse.ArgumentParser()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = str if parameter.default is None else type(parameter.default)
        parser.add_argument(f"--{name}", type=kind, default=parameter.default)
    return function(**vars(parser.parse_args()))


def install_packages(folder: Path) -> None:
    """Put the stand-ins that the files in ``folder`` import into ``sys.modules``, where ``import``
    finds them first. Libraries ask for the others, too."""
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    data_sets = dict.fromkeys(("CIFAR10", "ImageFolder", "LSUN", "FakeData"), Images) | {"MNIST": Digits}
    transforms = {"Compose": _Compose, "ToTensor": _ToTensor, "Normalize": _Normalize, "Resize": _Resize}
    packages: dict[str, dict[str, Any]] = {
        "torchvision": {"__path__": []},
        "torchvision.datasets": data_sets,
        "torchvision.transforms": transforms | {"CenterCrop": _CenterCrop},
        "torchvision.models": {"AlexNet": _alexnet, "vgg19": None},
        "torchvision.utils": {"make_grid": lambda images, **options: images[0], "save_image": _save_image},
        "datasets": {"__path__": [], "load_dataset": _load_dataset},
        "datasets.arrow_dataset": {"Dataset": Records},
        "fire": {"Fire": _fire},
        "loguru": {"logger": logging.getLogger("loguru")},
        "sh": {"git": _Git(), "ErrorReturnCode_128": type("ErrorReturnCode_128", (_NoRepository,), {})}
        | {"ErrorReturnCode_129": type("ErrorReturnCode_129", (_NoRepository,), {})},
    }
    for name, content in packages.items():
        if f"import {name.partition('.')[0]}" not in sources and f"from {name.partition('.')[0]}" not in sources:
            continue
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


class CudaIsCpu(TorchFunctionMode):
    """Let a script that names ``cuda`` run without a GPU: its tensors are created on the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            is_cuda = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_cuda else value

        return func(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


def without_cuda() -> AbstractContextManager[Any]:
    """Return the mode, with the torch.cuda calls of the examples disabled."""
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    return CudaIsCpu()


class PlainEngine(torch.nn.Module):
    """Plain torch under an engine's verbs: gradients summed over the backwards of a step, averaged
    over the ranks, torch's Adam."""

    def __init__(self, model: torch.nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = model
        self.global_steps = self.micro_steps = 0
        self._samples = int(config["train_batch_size"])
        params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
        self.optimizer = torch.optim.Adam(model.parameters(), **params)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.micro_steps += 1

    def train_batch_size(self) -> int:
        return self._samples

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._samples // torch.distributed.get_world_size()

    def gradient_accumulation_steps(self) -> int:
        return 1

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def fp16_enabled(self) -> bool:
        return False

    def save_checkpoint(self, folder: str, tag: str, **options: Any) -> None:
        if torch.distributed.get_rank() == 0:
            Path(folder, tag).write_text("not of interest")


def plain_initialize(*, model: torch.nn.Module, config: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """Stand in for ``deepspeed.initialize``."""
    engine = PlainEngine(model, config)
    return engine, engine.optimizer, None, None


# --- the run --------------------------------------------------------------------------------------


def record_losses(losses: Losses, most: int | None, nudge: bool) -> None:
    """Record the losses that the script passes to the engines of ``deepspeed.initialize``; end it
    after ``most`` losses. With ``nudge``, multiply the models' weights by 1 + 2^-23 first."""
    import deepspeed

    count = 0
    build = deepspeed.initialize

    def note(number: int, loss: Any) -> None:
        losses.append((number, float(loss)))

    def watched(number: int, engine: Any, verb: str) -> None:
        call = getattr(engine, verb)

        def record(*args: Any, **options: Any) -> Any:
            if most is not None and len(losses) >= most:
                raise _EnoughSteps(0)
            if verb == "backward":
                note(number, args[0])
            result = call(*args, **options)
            if verb == "train_batch":
                note(number, result)
            return result

        setattr(engine, verb, record)

    def initialize(*args: Any, **options: Any) -> Any:
        nonlocal count
        with torch.no_grad():
            for parameter in options["model"].parameters() if nudge else ():
                parameter.mul_(1 + 2**-23)
        engine, *rest = build(*args, **options)
        watched(count, engine, "train_batch" if hasattr(engine, "set_dataiterator") else "backward")
        count += 1
        return engine, *rest

    deepspeed.initialize = initialize


def main() -> None:
    """Prepare this process as the options say, and run the script or the trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=Path, required=True, metavar="FILE")
    parser.add_argument("--folder", type=Path, required=True, help="of the example; the process works there")
    parser.add_argument("--most", type=int, help="end a script after so many losses")
    parser.add_argument("--as-determined", action="store_true", help="zero_trial's DeepSpeedTrial")
    parser.add_argument("--peer", action="store_true", help="upstream deepspeed")
    parser.add_argument("--plain", action="store_true", help="plain torch in place of an engine")
    parser.add_argument("--nudge", action="store_true", help="begin with each weight one rounding larger")
    parser.add_argument("program", help="SCRIPT.py, or module:Class")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    os.chdir(options.folder)
    torch.set_num_threads(1)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1)
    install_packages(options.folder)
    if not options.peer:
        import zero_trial.as_deepspeed  # noqa: F401
    if options.as_determined:
        from zero_trial.compat.determined_table import install_determined

        install_determined()
    losses: Losses = []
    if options.peer:
        # or the trial's context starts torch.distributed, and DeepSpeed's comm does not see it
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
    if options.plain:
        importlib.import_module("deepspeed").initialize = plain_initialize  # type: ignore[attr-defined]
    record_losses(losses, options.most, options.nudge)
    rank = int(os.environ["RANK"])
    try:
        with without_cuda() if not torch.cuda.is_available() else nullcontext():
            _run(options.program, options.arguments)
    except _EnoughSteps:
        pass
    finally:
        options.losses.with_name(f"{options.losses.name}.{rank}").write_text(json.dumps(losses))


def _run(program: str, arguments: list[str]) -> None:
    arguments = [os.environ["LOCAL_RANK"] if word == "LOCAL_RANK" else word for word in arguments]
    if program.endswith(".py"):
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
        return
    from zero_trial.run import main as run_rank

    if code := run_rank([program, *arguments]):
        sys.exit(code)


if __name__ == "__main__":
    main()
