"""``import deepspeed`` in a process of its own: what the stand-in answers, and that it comes only
when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASIC = """
import zero_trial.as_deepspeed
import importlib.metadata, importlib.util
import deepspeed
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
import zero_trial
assert deepspeed.__version__ == importlib.metadata.version("deepspeed") == "0.19.8"
assert deepspeed.dist.get_rank is deepspeed.comm.get_rank
assert importlib.util.find_spec("deepspeed") is not None
assert "deepspeed" in importlib.metadata.packages_distributions()
assert deepspeed.initialize is zero_trial.initialize
assert deepspeed.zero.Init is zero_trial.zero.Init
assert PipelineModule is zero_trial.PipelineModule
"""


def python(code: str, *, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "ZERO_TRIAL_AS_DEEPSPEED"} | env
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_scripts_find_a_deepspeed():
    done = python(BASIC)
    assert done.returncode == 0, done.stderr


def test_zero_trial_alone_brings_no_stand_in():
    code = "import zero_trial, zero_trial.cli.main, sys, importlib.util\n"
    code += "assert not [m for m in sys.modules if 'compat' in m or 'deepspeed' in m]"
    assert python(code).returncode == 0


def test_the_variable_installs_it_with_zero_trial():
    code = "import zero_trial, deepspeed; print(deepspeed.__version__)"
    assert python(code, ZERO_TRIAL_AS_DEEPSPEED="1").stdout == "0.19.8\n"
    assert python(code, ZERO_TRIAL_AS_DEEPSPEED="yes").returncode != 0


def test_an_installed_deepspeed_is_not_hidden_unasked(tmp_path: Path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'\n")
    path = str(tmp_path)
    refused = python("import zero_trial.as_deepspeed", path=path)
    assert refused.returncode != 0 and str(tmp_path) in refused.stderr and "ConfigError" in refused.stderr
    late = python("import zero_trial, deepspeed", path=path, ZERO_TRIAL_AS_DEEPSPEED="1")
    assert late.returncode != 0 and "ConfigError" in late.stderr
    code = "import zero_trial.as_deepspeed, deepspeed, importlib.metadata as m\n"
    code += "print(deepspeed.__version__, m.version('deepspeed'))"
    assert python(code, path=path, ZERO_TRIAL_AS_DEEPSPEED="replace").stdout == "0.19.8 0.19.8\n"
    loaded = python("import deepspeed, zero_trial.as_deepspeed", path=path)
    assert loaded.returncode != 0 and "before its stand-in" in loaded.stderr


SCRIPT = """
import argparse, os, sys
import deepspeed, torch
from deepspeed.accelerator import get_accelerator
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
engine, optimizer, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=config)
assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
for _ in range(2):
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
child = os.popen(f"{sys.executable} -c 'import zero_trial, deepspeed; print(deepspeed.__version__)'").read().strip()
place = get_accelerator().device_name(args.local_rank), args.local_rank, deepspeed.comm.get_rank()
open(f"{args.local_rank}.txt", "w").write(f"{loss.item() > 0} {place} {child}")
"""


@pytest.mark.smoke
def test_a_script_for_deepspeed_runs_unchanged_on_two_ranks(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2", "--as-deepspeed", "train.py"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == f"True ('cpu', {rank}, {rank}) 0.19.8"


def test_programs_are_run_as_main_with_it(tmp_path: Path):
    """For launchers of other projects: their own process, and the ranks that they start."""
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = "import deepspeed, sys, beside\nprint(__name__, deepspeed.__version__, sys.argv[1:], beside.NAME)\n"
    (tmp_path / "script.py").write_text(script)
    for target in ([str(tmp_path / "script.py")], ["-m", "script"]):
        command = [sys.executable, "-m", "zero_trial.as_deepspeed", *target, "one"]
        root = str(Path(__file__).parents[3])
        env = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "__main__ 0.19.8 ['one'] beside\n", done.stderr
    assert python("import runpy; runpy.run_module('zero_trial.as_deepspeed', run_name='__main__')").returncode != 0


ACCELERATE = """
import zero_trial.as_deepspeed, sys, torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: False
from deepspeed import comm
for state in ({"backend": None}, {"backend": "nccl"}, {"backend": None, "num_processes": 1}):
    accelerate = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=state))
    accelerate.DistributedType = SimpleNamespace(MULTI_CPU="cpus")
    sys.modules["accelerate.state"] = accelerate
    comm.init_distributed(dist_backend=None, auto_mpi_discovery=False)
    print(state)
"""


ALONE = """
import torch
import zero_trial.as_deepspeed
import deepspeed
assert not torch.distributed.is_initialized()
with deepspeed.zero.Init():
    model = torch.nn.Linear(2, 1)
    assert deepspeed.comm.get_rank() == 0
engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 1, "zero_optimization": {"stage": 3}})
engine.backward(engine(torch.ones(1, 2)).sum())
assert torch.distributed.get_world_size() == 1
torch.distributed.barrier()
"""


def test_a_process_without_a_launcher_is_connected_as_deepspeed_does():
    """transformers and accelerate ask torch.distributed for the rank."""
    init = python(ALONE)
    assert init.returncode == 0, init.stderr
    initialize = python(ALONE.replace("with deepspeed.zero.Init():", "if True:").replace("    assert", "    #"))
    assert initialize.returncode == 0, initialize.stderr


def test_accelerate_counts_ranks_on_cpus():
    """It asks for no backend where there is no GPU, and would take each rank for the only one. What
    it has filled in already stays."""
    done = python(ACCELERATE)
    expected = [{"backend": "gloo", "distributed_type": "cpus"}, {"backend": "nccl"}]
    expected += [{"backend": None, "num_processes": 1}]
    assert done.stdout.splitlines() == [str(state) for state in expected], done.stderr
