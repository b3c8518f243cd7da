"""What another machine lacks or does otherwise: an instruction set, a C++ compiler, shared memory,
Linux. Settings and patches of a subprocess stand for that machine.

Another processor adds up in another order and fuses other products. A tolerance that was read off
one machine fails here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "MKL_CBWR=COMPATIBLE",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX512",
)
NUMERIC = [
    *(
        f"engine/test_{topic}.py"
        for topic in ("oracle", "keys", "precision", "models", "optimizers", "user_code", "kernels_of_engines")
    ),
    *(
        f"engine/test_{topic}.py"
        for topic in ("parallel_models", "backward", "pipeline_engine", "pipeline_build", "pipeline_data_and_faults")
    ),
    *("compat/importing/test_deepspeed.py", "ops", "pipeline", "sharding/test_layout.py"),
]


def test_the_numeric_tests_are_there() -> None:
    assert [name for name in NUMERIC if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.extended
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_numeric_tests_pass(setting: str) -> None:
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not extended", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in NUMERIC)],
        cwd=ROOT,
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]


# --- machines that lack something -----------------------------------------------------------------

SCRIPT = """
import torch, zero_trial
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :3].sum(1, keepdim=True).sin())
config = {
    "train_batch_size": 32, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
engine, _, loader, _ = zero_trial.initialize(model=model, training_data=data, config=config)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print("loss", loss.item())
engine.save_checkpoint("checkpoints")
engine.load_checkpoint("checkpoints")
"""

# Read by every Python of the run before its program. torch and psutil stay those of this machine.
NO_MEMORY = """
import os
def refuse(*_):
    raise OSError("switched off")
os.memfd_create = refuse
"""
MAC = """
import asyncio, builtins, io, mmap, multiprocessing.spawn, os, platform, sys
import psutil, torch, torch.distributed
sys.platform, platform.machine = "darwin", lambda: "arm64"
for name in ("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "O_DIRECT"):
    delattr(os, name)
del mmap.MADV_HUGEPAGE, mmap.MADV_REMOVE
def without_proc(call):
    def opened(path, *args, **kwargs):
        if str(path).startswith(("/proc/", "/sys/")) and "psutil" not in sys._getframe(1).f_code.co_filename:
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *args, **kwargs)
    return opened
builtins.open = io.open = without_proc(io.open)
os.open = without_proc(os.open)
"""
TORCH = "CPU kernels run as plain torch: "
NO_COMPILER = "no C++ compiler: c++, g++, clang++ not found"
GLOO = "ranks exchange tensors on the host over gloo, slower than through shared memory: "


def losses(folder: Path, patch: str = "", **env: str) -> tuple[list[float], str]:
    """Return the losses of two ranks, and what else the run printed."""
    (folder / "sitecustomize.py").write_text(patch)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2", "train.py"]
    # A Mac's loopback is lo0, which this machine does not have.
    env = os.environ | {"PYTHONPATH": str(folder), "GLOO_SOCKET_IFNAME": "lo"} | env
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    found = [float(line.removeprefix("loss ")) for line in lines if line.startswith("loss ")]
    assert len(found) == 8, done.stdout + done.stderr
    return found, "\n".join(line for line in lines if not line.startswith("loss "))


@pytest.mark.slow
def test_machines_that_lack_something_train_alike_and_say_what_is_slower(tmp_path: Path) -> None:
    normal, text = losses(tmp_path)
    assert TORCH not in text and GLOO not in text
    no_compiler = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/nowhere"}
    for name, patch, env, said in (
        ("no compiler", NO_MEMORY, no_compiler, [TORCH + NO_COMPILER, GLOO + "switched off"]),
        ("mac", MAC, {}, [TORCH + "the kernel library cannot be loaded", GLOO + "arm64 does not preserve"]),
    ):
        found, text = losses(tmp_path, patch, **env)
        # the bound of gradient_clipping in docs/exactness.md
        assert found == pytest.approx(normal, abs=2e-6), name
        assert [text.count(line) for line in said] == [1] * len(said), f"{name}: {text}"
        assert text.count(TORCH) + text.count(GLOO) == len(said), f"{name}: {text}"
