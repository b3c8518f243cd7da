"""initialize(): its four results, what it takes for each argument, and what it logs."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES
from tests.support.pool import ENVIRONMENT, Pools
from zero_trial.engine.start import ConsoleHandler, engines_from, open_console
from zero_trial.engine.start_checks import log_model_parts
from zero_trial.errors import ConfigError, TrialError
from zero_trial.zero import ShardedOptimizer

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_four_results():
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    data = [(torch.ones(3), torch.zeros(2)) for _ in range(8)]
    engine, optimizer, loader, scheduler = zero_trial.initialize(
        model=nn.Linear(3, 2), config=CONFIG | {"scheduler": schedule}, training_data=data
    )
    assert optimizer is engine.optimizer and isinstance(optimizer, ShardedOptimizer)
    assert loader is engine.training_dataloader and scheduler is engine.lr_scheduler
    assert [len(x) for x, _ in loader] == [4, 4]


def test_a_factory_may_call_initialize_itself():
    seen: list[Any] = []

    def factory(**given: Any) -> Any:
        seen.append(sorted(given)[:2])
        return zero_trial.initialize(**given)

    with engines_from(factory):
        assert zero_trial.initialize(model=nn.Linear(3, 2), config=CONFIG)[0].global_steps == 0
    zero_trial.initialize(model=nn.Linear(3, 2), config=CONFIG)
    assert seen == [["args", "collate_fn"]]


@pytest.mark.parametrize("form", ["dict", "path", "text", "base64"])
def test_every_form_of_configuration(form: str, tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    given = {
        "dict": CONFIG,
        "path": path,
        "text": str(path),
        "base64": base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
    }[form]
    assert zero_trial.initialize(model=nn.Linear(3, 2), config=given)[0].train_batch_size() == 4


@pytest.mark.parametrize("kind", ["list", "generator", "named", "filter"])
def test_every_form_of_parameters(kind: str):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    given = {
        "list": list(model.parameters()),
        "generator": (param for param in model.parameters()),
        "named": list(model.named_parameters()),
        "filter": filter(lambda param: param.requires_grad, model.parameters()),
    }[kind]
    engine = zero_trial.initialize(model=model, config=CONFIG, model_parameters=given)[0]
    assert sum(unit.layout.payload for unit in engine.sharded.groups if unit.trainable) == 8


def test_a_model_without_parameters_is_refused():
    with pytest.raises(TrialError, match="nothing to train: got ReLU with 0 parameters"):
        zero_trial.initialize(model=nn.ReLU(), config=CONFIG)
    assert zero_trial.initialize(model=nn.ReLU(), config={"train_batch_size": 1})[1] is None


@pytest.mark.parametrize("by_callable", [False, True])
def test_a_clients_optimizer_overrides_that_of_ds_config_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture, by_callable: bool
) -> None:
    model = nn.Linear(3, 2)
    make = partial(torch.optim.SGD, lr=0.5)
    client = make if by_callable else make(model.parameters())
    with caplog.at_level(logging.WARNING):
        engine, optimizer, *_ = zero_trial.initialize(model=model, optimizer=client, config=CONFIG)
    assert optimizer is not None and isinstance(optimizer.base, torch.optim.SGD) and engine.get_lr() == [0.5]
    assert "using SGD, as DeepSpeed does, instead of AdamW from ds_config" in caplog.text


def test_two_lr_schedulers_are_refused() -> None:
    """DeepSpeed would use that of ds_config."""
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(ConfigError, match=r'StepLR, and WarmupLR in ds_config.* remove "scheduler"'):
        zero_trial.initialize(
            model=nn.Linear(3, 2), lr_scheduler=torch.optim.lr_scheduler.StepLR, config=CONFIG | scheduler
        )


def test_auto_takes_what_the_arguments_say(caplog: pytest.LogCaptureFixture):
    """As a script for Hugging Face's Trainer has them; what was filled in, and from what, is said
    once."""
    args = SimpleNamespace(learning_rate=0.25, weight_decay=0.5, max_grad_norm=2.0, train_batch_size=None)
    params = {"lr": "auto", "weight_decay": "auto"}
    config = CONFIG | {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": "auto"}
    with caplog.at_level("INFO", "zero_trial"):
        engine, *_ = zero_trial.initialize(args=args, model=nn.Linear(3, 2), config=config)
    assert engine.get_lr() == [0.25] and engine.config.gradient_clipping == 2.0
    (line,) = [record.message for record in caplog.records if "filled in" in record.message]
    assert "optimizer.params.lr 0.25 (hyperparameter learning_rate)" in line
    with pytest.raises(ConfigError, match=r"or args.learning_rate in a script"):
        zero_trial.initialize(model=nn.Linear(3, 2), config=config)


class ClientMpu:
    """A client's own grid: the model axis is its business."""

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        return 1


def with_mpu_and(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        zero_trial.initialize(model=nn.Linear(3, 2), config=CONFIG | section, mpu=ClientMpu())
    return str(raised.value)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"mesh": {"replica": 2}}, "mesh.replica"),
        ({"mesh": {"shard": 1}}, "mesh.shard"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, "zero_optimization.mics_shard_size"),
    ],
)
def test_other_axes_than_those_of_a_clients_mpu_are_refused(ranks: Pools, section: dict[str, Any], path: str) -> None:
    for text in ranks(2).run(with_mpu_and, section):
        assert text.startswith(f"{path}: ds_config and the mpu disagree"), text


def inference(stage: str) -> tuple[bool, int, bool]:
    """No optimizer: a reference or reward model. At stage 3 its parameters are sharded all the
    same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(2, 64)
    expected = model(x).detach()
    engine = zero_trial.initialize(model=model, config={"train_batch_size": 2, "zero_optimization": STAGES[stage]})[0]
    with torch.no_grad():
        alike = torch.equal(engine(x), expected)
    alike = alike and torch.equal(engine(x).detach(), expected)
    return (
        alike,
        sum(unit.persistent_bytes() for unit in engine.sharded.groups),
        all(not unit.trainable for unit in engine.sharded.groups),
    )


def test_an_engine_for_inference_only(ranks: Pools) -> None:
    assert ranks(2).run(inference, "zero2") == [(True, 0, True)] * 2
    assert ranks(2).run(inference, "zero3-free") == [(True, 2 * 64 * 65 * 4 // 2, True)] * 2


@pytest.mark.parametrize(
    ("size", "clip", "said"),
    [(1, 0.0, ""), (1, 1.0, "clips by its own gradient norm"), (2, 0.0, "all parameters are treated as copies")],
)
def test_what_parts_do_by_themselves(size: int, clip: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model in two parallel parts, whose ranks the mesh or an mpu knows."""
    where: Any = SimpleNamespace(rank=0, model_part=(0, 2), model=SimpleNamespace(size=size))
    how: Any = SimpleNamespace(clip=clip, policy=SimpleNamespace(param=torch.float32))
    log_model_parts(nn.Linear(2, 2), where, how)
    assert len(caplog.messages) == bool(said) and said in caplog.text


@pytest.fixture
def logger() -> logging.Logger:
    """One without a parent, which no one has set up."""
    return logging.Logger("alone")


def test_progress_on_stdout_and_warnings_on_stderr(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    open_console(None, logger, ConsoleHandler(lambda: False))
    logger.debug("hidden")
    logger.info("step=%d", 3)
    logger.warning("careful")
    captured = capsys.readouterr()
    assert captured.out == "step=3\n" and captured.err == "careful\n"


def test_what_the_program_has_set_up_is_kept(logger: logging.Logger):
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.ERROR)
    open_console(None, logger)
    open_console(None, logger)
    assert logger.level == logging.ERROR and not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers)


def test_a_misspelled_key_is_said_without_the_frames_of_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "train_batch_size": 4,\n  "zero_optimizaton": {"stage": 1}\n}')
    with pytest.raises(ConfigError) as raised:
        zero_trial.initialize(model=nn.Linear(2, 2), config=path)
    said = str(raised.value)
    assert "ds.json:3 zero_optimizaton" in said and '"zero_optimization"' in said and "\n" not in said
    assert [frame.name for frame in raised.traceback][1:] == ["initialize"]
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


SCRIPT = """
import ctypes, gc, logging, os, resource, signal, sys, warnings
from pathlib import Path
import torch, zero_trial

libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / ("libc10.so" if sys.platform == "linux" else "libc10.dylib")))
libc10._ZN3c1015GetCPUAllocatorEv.restype = ctypes.c_void_p
Module = torch.nn.modules.module

def of_the_process():
    found = {
        "torch's allocator": libc10._ZN3c1015GetCPUAllocatorEv(),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "hooks of all modules": {name: len(value) for name, value in vars(Module).items()
                                 if name.startswith("_global") and isinstance(value, dict)},
        "classes of torch": {(kind.__name__, name): id(value) for kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Module,
                             torch.nn.Linear, torch.optim.Optimizer) for name, value in vars(kind).items()
                             if not name.startswith(("__doc", "_abc"))},
        "functions of torch": {name: id(value) for name, value in vars(torch).items() if callable(value)},
        "functional": {name: id(value) for name, value in vars(torch.nn.functional).items() if callable(value)},
        "environment": {key: value for key, value in os.environ.items() if not key.startswith("KMP_")},
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "hooks of Python": (sys.excepthook, sys.displayhook, list(sys.meta_path), sys.getrecursionlimit(), sys.getprofile()),
        "loggers": (list(logging.root.handlers), logging.root.level),
        "warnings": list(warnings.filters),
        "settings of torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_deterministic_algorithms_warn_only_enabled(),
                              torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()),
    }
    if sys.platform == "linux":
        lines = Path("/proc/self/maps").read_text().splitlines()
        files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
        found["mapped files"] = sorted(name for name in files if name.startswith("/") and not name.endswith((".so", ".mo", ".cache"))
                                       and ".so." not in name and name != "/memfd:zero_trial_kernels (deleted)")
    return found

def differing(one, other):
    if not isinstance(one, dict):
        return one, other
    return {key: (one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)}

def model():
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)])

# torch and Python fill some of it themselves at the first use
torch.optim.AdamW(model().parameters()).step()
model()(torch.randn(2, 16)).sum().backward()
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
          "gradient_clipping": 1.0}
before = of_the_process()
for stage in (0, 3):
    engine, *_ = zero_trial.initialize(model=model(), config=config | {"zero_optimization": {"stage": stage}})
    built = of_the_process()
    engine.backward(engine(torch.randn(2, 16)).float().sum())
    engine.step()
    stepped = of_the_process()
    for when, now in (("building", built), ("a step", stepped)):
        for name, value in before.items():
            if value != now[name]:
                print(stage, when, "has changed", name, differing(value, now[name]))
"""


def test_an_engine_changes_nothing_of_the_process():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
