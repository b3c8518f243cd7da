"""``import deepspeed`` in processes of their own: what the stand-in answers, that it comes only if
asked for, and the line that a Python runs when it starts."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from zero_trial.compat.deepspeed.deepspeed_table import started_with_stand_in

BASIC = """
import zero_trial.as_deepspeed
import importlib.metadata, importlib.util, sys, torch
from types import SimpleNamespace
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

# Without a launcher: transformers and accelerate ask torch.distributed for the rank.
assert not torch.distributed.is_initialized()
with deepspeed.zero.Init():
    model = torch.nn.Linear(2, 1)
    assert deepspeed.comm.get_rank() == 0
config = {"train_batch_size": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 2)).sum())
assert torch.distributed.get_world_size() == 1
torch.distributed.barrier()

# accelerate asks for no backend where there is no GPU, and would take each rank for the only one.
# What it has filled in already stays.
torch.cuda.is_available = lambda: False
for state in ({"backend": None}, {"backend": "nccl"}, {"backend": None, "num_processes": 1}):
    accelerate = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=state))
    accelerate.DistributedType = SimpleNamespace(MULTI_CPU="cpus")
    sys.modules["accelerate.state"] = accelerate
    deepspeed.comm.init_distributed(dist_backend=None, auto_mpi_discovery=False)
    print(state)
"""


def python(code: str, path: str | Path = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``path`` before this tree on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "ZERO_TRIAL_AS_DEEPSPEED"} | env
    parts = [str(path), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_scripts_find_a_deepspeed() -> None:
    done = python(BASIC)
    assert done.returncode == 0, done.stderr
    expected = [{"backend": "gloo", "distributed_type": "cpus"}, {"backend": "nccl"}]
    expected += [{"backend": None, "num_processes": 1}]
    assert done.stdout.splitlines() == [str(state) for state in expected]


def test_it_comes_when_it_is_asked_for() -> None:
    code = "import zero_trial, zero_trial.cli.main, sys, importlib.util\n"
    code += "assert not [m for m in sys.modules if 'compat' in m or 'deepspeed' in m]"
    assert python(code).returncode == 0
    code = "import zero_trial, deepspeed; print(deepspeed.__version__)"
    assert python(code, ZERO_TRIAL_AS_DEEPSPEED="1").stdout == "0.19.8\n"
    assert python(code, ZERO_TRIAL_AS_DEEPSPEED="yes").returncode != 0
    assert python("import runpy; runpy.run_module('zero_trial.as_deepspeed', run_name='__main__')").returncode != 0


def test_an_installed_deepspeed_is_not_hidden_unasked(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'\n")
    refused = python("import zero_trial.as_deepspeed", tmp_path)
    assert refused.returncode != 0 and str(tmp_path) in refused.stderr and "ConfigError" in refused.stderr
    late = python("import zero_trial, deepspeed", tmp_path, ZERO_TRIAL_AS_DEEPSPEED="1")
    assert late.returncode != 0 and "ConfigError" in late.stderr
    code = "import zero_trial.as_deepspeed, deepspeed, importlib.metadata as m\n"
    code += "print(deepspeed.__version__, m.version('deepspeed'))"
    assert python(code, tmp_path, ZERO_TRIAL_AS_DEEPSPEED="replace").stdout == "0.19.8 0.19.8\n"
    loaded = python("import deepspeed, zero_trial.as_deepspeed", tmp_path)
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
def test_a_script_for_deepspeed_runs_unchanged_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2", "--as-deepspeed", "train.py"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == f"True ('cpu', {rank}, {rank}) 0.19.8"


PROGRAM = """
import multiprocessing, sys
import deepspeed, importlib.metadata, neighbor

def version(number):
    return [deepspeed.__version__, importlib.metadata.version("deepspeed")][number]

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(neighbor.NAME, sys.argv[1:], pool.map(version, range(2)))
"""


@pytest.mark.parametrize(("method", "target"), [("spawn", ["program.py"]), ("forkserver", ["-m", "program"])])
def test_programs_are_run_as_main_with_it(tmp_path: Path, method: str, target: list[str]) -> None:
    """For launchers of other projects, and the workers that they start. With nothing installed: the
    tree on PYTHONPATH alone."""
    (tmp_path / "neighbor.py").write_text("NAME = 'neighbor'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    env = {k: v for k, v in os.environ.items() if k != "ZERO_TRIAL_AS_DEEPSPEED"} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "zero_trial.as_deepspeed", *target, method]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"neighbor {[method]} ['0.19.8', '0.19.8']\n", done.stderr


# --- the line that a Python runs when it starts ---------------------------------------------------


def started(folder: Path, code: str, value: str = "1") -> subprocess.CompletedProcess[str]:
    """Run ``code`` after site has read the line of setup.py from ``folder``, as it does from
    site-packages."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (line,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "START"]
    (folder / "zero_trial_start.pth").write_text(str(ast.literal_eval(line)))
    return python(f"import site, sys; site.addsitedir({str(folder)!r})\n{code}", ZERO_TRIAL_AS_DEEPSPEED=value)


def test_what_the_line_loads(tmp_path: Path) -> None:
    loaded = "print(sorted(name for name in sys.modules if name.startswith('zero_trial')))\n"
    for value, names in ("", []), ("0", []), ("1", ["zero_trial_start"]):
        done = started(tmp_path, loaded, value)
        assert done.stdout == f"{names}\n", done.stderr
    code = "import importlib.metadata, importlib.util\n"
    code += "assert importlib.util.find_spec('json.tool') and 'pytest' in importlib.metadata.packages_distributions()\n"
    code += "print(importlib.metadata.version('deepspeed'), importlib.util.find_spec('deepspeed').name)\n"
    code += "import deepspeed, deepspeed.pipe, zero_trial.as_deepspeed, zero_trial.as_determined\n"
    done = started(tmp_path, code + "print(deepspeed.__version__, *(type(one).__name__ for one in sys.meta_path[:2]))")
    assert done.stdout.startswith("0.19.8 deepspeed\n0.19.8 ") and "StandInFinder" in done.stdout, done.stderr
    (tmp_path / "deepspeed.py").write_text("")  # the real one is refused at its import
    done = started(tmp_path, "print(1)\nimport deepspeed")
    assert done.returncode != 0 and done.stdout == "1\n" and str(tmp_path / "deepspeed.py") in done.stderr


def test_pythons_of_a_run_start_with_the_stand_in() -> None:
    env = started_with_stand_in({"PYTHONPATH": os.pathsep.join(["/mine", "/too"]), "HOME": "/h"}, "replace")
    first, *others = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file() and others == ["/mine", "/too"]
    assert env["ZERO_TRIAL_AS_DEEPSPEED"] == "replace" and env["HOME"] == "/h"
    assert started_with_stand_in(env) == env
    assert started_with_stand_in({})["ZERO_TRIAL_AS_DEEPSPEED"] == "1"
