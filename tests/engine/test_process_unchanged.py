"""An engine changes nothing that belongs to the whole process, neither when it is built nor in a
step."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
                                       and ".so." not in name)
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
STAGE = int(sys.argv[1])
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
          "gradient_clipping": 1.0, "zero_optimization": {"stage": STAGE}}
before = of_the_process()
engine, *_ = zero_trial.initialize(model=model(), config=config)
built = of_the_process()
engine.backward(engine(torch.randn(2, 16)).float().sum())
engine.step()
stepped = of_the_process()
for when, now in (("building", built), ("a step", stepped)):
    for name, value in before.items():
        if value != now[name]:
            print(when, "has changed", name, differing(value, now[name]))
"""


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_changes_nothing_of_the_process(stage: int):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stage)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
