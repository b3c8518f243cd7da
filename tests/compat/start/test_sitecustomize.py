"""The harness's absolute paths moved below DET_RUN_ROOT, and the launcher's line about failed
ranks, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zero_trial.master.agent.environment import RELOCATION

SHOW = """
import importlib.util, determined._info as i, determined.constants as c, determined.common.constants as k
spec = importlib.util.find_spec("determined.exec.prep_container")
code = spec.loader.get_code("determined.exec.prep_container")
def strings(code):
    for value in code.co_consts:
        if isinstance(value, str): yield value
        elif hasattr(value, "co_consts"): yield from strings(value)
for path in (i.DEFAULT_CLUSTER_INFO_PATH, c.MANAGED_TRAINING_MODEL_COPY, k.SHARED_FS_CONTAINER_PATH): print(path)
print([s for s in strings(code) if "/tmp/tensorboard" in s and " " not in s])
"""


def python(code: str, path: list[Path], **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DET_RUN_ROOT")}
    joined = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "PYTHONPATH": joined, **env},
    )


def test_paths_are_moved() -> None:
    done = python(SHOW, [RELOCATION], DET_RUN_ROOT="/there")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "/there/run/determined/info/cluster.json",
        "/there/run/determined/train/model",
        "/there/determined_shared_fs",
        "['/there/tmp/tensorboard-', '/there/tmp/tensorboard']",
    ]


def test_the_socket_of_a_launcher_is_moved_where_a_run_has_several_nodes() -> None:
    code = "import determined.launch.torch_distributed as l; print(l.create_pid_server_cmd('a', 2)[7])"
    for env, path in (({}, "/tmp/pid_server-a"), ({"DET_SOCKET_ROOT": "/tmp/zt-1"}, "/tmp/zt-1/tmp/pid_server-a")):
        done = python(code, [RELOCATION], DET_RUN_ROOT="/there", **env)
        assert done.stdout.split() == [path], done.stdout + done.stderr


def test_without_a_root_nothing_is_moved() -> None:
    done = python("import determined._info as i; print(i.DEFAULT_CLUSTER_INFO_PATH)", [RELOCATION])
    assert done.stdout == "/run/determined/info/cluster.json\n"


def test_other_paths_and_texts_about_a_path(tmp_path: Path) -> None:
    """A harness that keeps its files elsewhere is refused."""
    (tmp_path / "determined").mkdir()
    (tmp_path / "determined" / "__init__.py").write_text("")
    info = tmp_path / "determined" / "_info.py"
    info.write_text("PATH = '/run/determined/x'\nTEXT = '/run/determined is a folder'\n")
    code = "import determined._info as i; print(i.PATH, '|', i.TEXT)"
    done = python(code, [RELOCATION, tmp_path], DET_RUN_ROOT="/there")
    assert done.stdout == "/there/run/determined/x | /run/determined is a folder\n"
    info.write_text("PATH = '/var/determined/info'\n")
    done = python("import determined._info", [RELOCATION, tmp_path], DET_RUN_ROOT="/there")
    assert done.returncode != 0 and "determined._info has no path that starts with /run/determined" in done.stderr


def test_another_sitecustomize_is_run_after_this_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.from_the_other = 'yes'\n")
    code = "import sys; print(from_the_other, sys.modules['sitecustomize'].__file__)"
    done = python(code, [RELOCATION, tmp_path], DET_RUN_ROOT="/there")
    assert done.stdout == f"yes {tmp_path / 'sitecustomize.py'}\n", done.stderr


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]


def launched(body: str, folder: Path, **env: str) -> list[str]:
    """What is printed by torch.distributed.run over two ranks that run ``body``."""
    (folder / "rank.py").write_text(f"import os, signal\nrank = int(os.environ['RANK'])\n{body}\nsignal.pause()\n")
    words = [*LAUNCH, "--log-dir", str(folder / "logs"), str(folder / "rank.py")]
    path = os.pathsep.join([str(RELOCATION), *filter(None, [os.environ.get("PYTHONPATH")])])
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=folder, env=full)
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_a_launcher_says_one_line_of_ranks_that_failed(tmp_path: Path) -> None:
    """In place of two lines for each rank, a traceback of its own and a table."""
    lines = launched("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", tmp_path, DET_RUN_ROOT="/there")
    assert lines == [
        "error   rank 1: killed by SIGKILL (signal 9). Killed from outside, or by the kernel's OOM killer (see dmesg); "
        "ended with it: rank 0"
    ]


def test_other_errors_of_a_launcher_are_shown_as_ever(tmp_path: Path) -> None:
    code = "import sitecustomize as s, sys; sys.excepthook = s.print_failure; raise KeyError('x')"
    done = python(code, [RELOCATION], DET_RUN_ROOT="/there")
    assert "Traceback" in done.stderr and done.stderr.endswith("KeyError: 'x'\n")
