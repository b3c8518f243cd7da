"""A real master in a folder of its own, and Determined's ``det`` against it: as a program, or
quicker in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

BIN = Path(sys.executable).parent
SECONDS = 240.0  # until a thing that is waited for must have come, on a busy machine

# A trial without torch. It saves when it is asked to stop and at its end, and goes on from where it
# stopped.
TRAIN = """
import json, os, sys, time
import determined
from determined import core

info = determined.get_cluster_info()
hparams = info.trial.hparams
steps, pause = int(hparams.get("steps", 3)), float(hparams.get("pause", 0.0))
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    start = 0
    if info.latest_checkpoint:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            start = json.loads((path / "state.json").read_text())["step"]
    print("starts after step", start, flush=True)
    for step in range(start + 1, steps + 1):
        time.sleep(pause)
        context.train.report_training_metrics(steps_completed=step, metrics={"loss": 1.0 / step})
        context.train.report_progress(step / steps)
        if hparams.get("crash") and step > 1:
            print("crashes on purpose", flush=True)
            sys.exit(7)
        metric = float(hparams.get("x", 1.0)) / step
        context.train.report_validation_metrics(steps_completed=step, metrics={"validation_loss": metric, "batches": step})
        print("step", step, flush=True)
        if step == steps or context.preempt.should_preempt():
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state.json").write_text(json.dumps({"step": step}))
            break
"""

CONFIG: Mapping[str, Any] = {
    "name": "tiny",
    "entrypoint": "python3 train.py",
    "resources": {"slots_per_trial": 1},
    "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
    "hyperparameters": {"steps": 3},
    "max_restarts": 0,
}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Det:
    """One master and a user of it. ``folder`` holds the master's root, a home for det, and
    contexts."""

    folder: Path
    exports: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("--slots", "4", "--cpu")  # of `zero-trial master up`

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def url(self) -> str:
        return self.exports["DET_MASTER"]

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
        home = str(self.folder / "home")
        changed = {
            "HOME": home,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DET_DEBUG_CONFIG_PATH": home,
            "OMP_NUM_THREADS": "1",
        }
        return {"OF_THE_MASTER": "leaked", **kept, **changed, **self.exports}

    def zero_trial(self, *words: str) -> Result:
        """``zero-trial WORDS --root ...``."""
        return self._program("zero-trial", *words, "--root", str(self.root))

    def program(self, *words: str) -> Result:
        """Determined's ``det`` as users run it."""
        return self._program("det", *words)

    def _program(self, name: str, *words: str) -> Result:
        done = subprocess.run(
            [str(BIN / name), *words],
            env=self.env(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def run(self, *words: str) -> Result:
        """The same code as ``det``, without the half second in which it is imported, and with a
        parser of this one command only."""
        from determined.cli import cli

        needed = [node for node in cli.all_args_description if _spoken(getattr(node, "name", words[0])) == words[0]]
        out, err = io.StringIO(), io.StringIO()
        code: object = 0
        with (
            mock.patch.dict(os.environ, self.env(), clear=True),
            mock.patch("sys.stdin", io.StringIO()),
            mock.patch("sys.argv", ["det"]),
            mock.patch.object(cli, "all_args_description", needed),
            _inside(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main(["-m", self.url, *words])
            except SystemExit as ended:
                code = ended.code
        return Result(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue())

    def ok(self, *words: str) -> str:
        """What ``det WORDS`` printed; fails if it did not end well."""
        result = self.run(*words)
        assert result.code == 0, f"det {' '.join(words)}: {result.text}"
        return result.out

    def json(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def context(self, name: str = "context") -> Path:
        """A folder with the tiny trial in it."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(TRAIN)
        return folder

    def write(self, **changes: Any) -> Path:
        """A configuration file: the tiny one with changes, which may be whole sections."""
        file = self.folder / "config.yaml"
        file.write_text(json.dumps({**CONFIG, **changes}))
        return file

    def create(self, *options: str, context: Path | None = None, **changes: Any) -> int:
        """Submit the tiny configuration with changes; the experiment's number."""
        return self.submit(self.write(**changes), context or self.context(), *options)

    def submit(self, file: Path, context: Path, *options: str) -> int:
        out = self.ok("experiment", "create", str(file), str(context), *options)
        return int(out.rpartition("Created experiment ")[2].split()[0])

    def experiment(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.json("experiment", "describe", str(number))[0]["experiment"]
        return found

    def state(self, number: int) -> str:
        return str(self.experiment(number)["state"]).removeprefix("STATE_")

    def trials(self, number: int) -> list[dict[str, Any]]:
        """The trials of an experiment as the API gives them."""
        from determined.common.api import bindings

        return [each.to_json() for each in bindings.get_GetExperimentTrials(self.session(), experimentId=number).trials]

    def session(self) -> Any:
        """The original client's session with the local user's token."""
        from determined.common import api

        return api.Session(self.url, self.exports["DET_USER"], self.exports["DET_USER_TOKEN"], None)

    def logs(self, trial: int) -> str:
        return self.ok("trial", "logs", str(trial))

    def wait(self, number: int, *states: str) -> str:
        """Until the experiment is in one of the states (without any: until it has ended)."""
        wanted = states or ("COMPLETED", "CANCELED", "ERROR")
        until(lambda: self._state(number) in wanted, f"experiment {number} is never {wanted}")
        return self._state(number)

    def _state(self, number: int) -> str:
        """The state from the API: a whole ``det`` for each look would slow down what is waited
        for."""
        from determined.common.api import bindings

        found = bindings.get_GetExperiment(self.session(), experimentId=number).experiment
        return str(found.state.value).removeprefix("STATE_")

    def idle(self) -> None:
        """Until no trial runs, and no checkpoint of an ended one is being deleted."""
        until(lambda: not self.json("task", "list"), "a trial, or the deletion of checkpoints, never ends")

    def wait_for_line(self, trial: int, text: str) -> None:
        """Until a line of the trial's log holds the text."""
        from determined.common.api import bindings

        def logged() -> bool:
            return any(text in line.message for line in bindings.get_TrialLogs(self.session(), trialId=trial))

        until(logged, f"the log of trial {trial} never holds {text!r}")

    def up(self) -> dict[str, Any]:
        """Start the master, or find it."""
        result = self.zero_trial("master", "up", *self.options, "--json")
        assert result.code == 0, result.text
        found: dict[str, Any] = json.loads(result.out)
        self.exports = found["env"]
        return found

    def pid(self) -> int:
        return int(json.loads((self.root / "master.json").read_text())["pid"])

    def kill_9(self) -> None:
        """The master is gone from one moment to the next; its trials are not."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the master does not die")


def _spoken(name: str) -> str:
    """The first way to say a command: ``experiment`` of ``e|xperiment``, ``list`` of ``list
    ls``."""
    return name.split(" ")[0].replace("|", "")


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def until(true: Callable[[], bool], otherwise: str) -> None:
    """Look again and again until it is true; fail with ``otherwise`` if it never is."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Det]:
    """A master with four slots (or other options) until the block ends; then nothing of it is
    left."""
    pytest.importorskip("determined")
    det = Det(folder, options=options or Det.options)
    (folder / "home").mkdir()
    det.up()
    try:
        yield det
    finally:
        down = det.zero_trial("master", "down")
    assert down.code == 0, down.text
    assert left_of(det.root) == []


def left_of(root: Path) -> list[str]:
    """Processes whose command line or environment names a master's folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if str(root).encode() + b"/" in words:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
