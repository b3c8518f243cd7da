"""As much of a Determined master as Determined's harness asks for, and the container steps around
one task."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.archive import tgz
from zero_trial.master.agent import storage

# Loaded by every Python of a task: the harness's fixed paths, moved below the task's own folder.
RELOCATION = """
import importlib.abc, importlib.machinery, os, sys
root = os.environ.get("STUB_RUN_ROOT")
class Finder(importlib.abc.MetaPathFinder):
    names = ("determined._info", "determined.constants", "determined.common.constants")
    def find_spec(self, name, path, target=None):
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader
        class Loader(type(loader)):
            def get_code(self, fullname):
                text = self.get_data(self.path).decode()
                text = text.replace("/run/determined", root + "/run").replace("/determined_shared_fs", os.path.dirname(root) + "/shared_fs")
                return compile(text, self.path, "exec")
        spec.loader = Loader(loader.name, loader.path)
        return spec
if root:
    sys.meta_path.insert(0, Finder())
"""


@dataclass
class Asked:
    """What was reported to the master about one trial, in order."""

    reports: list[tuple[str, int | None, dict[str, Any]]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    early_exits: list[str] = field(default_factory=list)
    acks: int = 0

    def losses(self) -> list[tuple[int, float]]:
        return [(step or 0, metrics["loss"]) for group, step, metrics in self.reports if group == "training"]

    def validations(self) -> list[tuple[int, dict[str, Any]]]:
        return [(step or 0, metrics) for group, step, metrics in self.reports if group == "validation"]


class StubMaster:
    """Answers at ``url``. ``preempt_after``: the training report of this step sets the preemption
    flag."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked = Asked()
        self.preempt_after: int | None = None
        self.unknown: list[str] = []
        self._context = b""
        self._slots = 1
        self._preempt = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        (root / "site").mkdir(parents=True)
        (root / "site" / "sitecustomize.py").write_text(RELOCATION)

    def close(self) -> None:
        self._preempt.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        for pattern, act in self._routes():
            found = re.fullmatch(pattern, f"{method} {path}")
            if found:
                return act(body)
        self.unknown.append(f"{method} {path}")
        return 404, {"message": f"no {method} {path}"}

    def _routes(self) -> list[tuple[str, Callable[[Any], tuple[int, Any]]]]:
        def note(store: list[Any], value: Callable[[Any], Any]) -> Callable[[Any], tuple[int, Any]]:
            def act(body: Any) -> tuple[int, Any]:
                store.append(value(body))
                return 200, {}

            return act

        rendezvous = {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [self._slots]}}
        return [
            (r"GET .*/context_directory", lambda _: (200, {"b64Tgz": base64.b64encode(self._context).decode()})),
            (r"POST .*/acceleratorData", lambda _: (200, {})),
            (r"GET .*/rendezvous", lambda _: (200, rendezvous)),
            (r"POST /api/v1/runs/start", lambda _: (200, {"storageId": None})),
            (r"GET .*/signals/preemption", lambda wait: (200, {"preempt": self._preempt.wait(wait)})),
            (r"POST .*/signals/ack_preemption", self._ack),
            (r"POST /api/v1/trials/\d+/metrics", self._metrics),
            (r"POST /api/v1/trials/\d+/progress", note(self.asked.progress, lambda body: body["progress"])),
            (r"POST /api/v1/trials/\d+/runner/metadata", lambda _: (200, {})),
            (r"(GET|POST) /api/v1/runs/\d+/metadata", lambda body: (200, body or {"metadata": {}})),
            (r"POST /api/v1/trials/\d+/early_exit", note(self.asked.early_exits, lambda body: body["reason"])),
            (r"POST /api/v1/checkpoints", note(self.asked.checkpoints, lambda body: body)),
            (r"GET .*/best_searcher_validation_metric", self._best),
        ]

    def _ack(self, _: Any) -> tuple[int, Any]:
        self.asked.acks += 1
        return 200, {}

    def _metrics(self, body: Any) -> tuple[int, Any]:
        report = body["metrics"]
        self.asked.reports.append((body["group"], report.get("stepsCompleted"), report["metrics"]["avgMetrics"]))
        if self.preempt_after is not None and (report.get("stepsCompleted") or 0) >= self.preempt_after:
            self._preempt.set()
        return 200, {}

    def _best(self, _: Any) -> tuple[int, Any]:
        values = [metrics["validation_loss"] for _, metrics in self.asked.validations()]
        return (200, {"metric": min(values)}) if values else (404, {"message": "none yet"})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        master = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                path, _, query = self.path.partition("?")
                if path.endswith("/signals/preemption"):
                    body = min(float(query.partition("timeout_seconds=")[2] or 0), 30.0)
                code, content = master.answer(self.command, path, body)
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a task that ended while it waited
                    self.wfile.write(data)

            do_GET = do_POST = do_PATCH = _do

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def run(self, files: Mapping[str, str], config: Mapping[str, Any], **options: Any) -> Task:
        """One allocation of trial 1 from its container steps to the end."""
        self.asked = Asked()
        self._preempt.clear()
        self._context = tgz(files)
        self._slots = options.get("slots", 1)
        return Task.run(self, config, **options)


@dataclass(frozen=True)
class Task:
    """How an allocation ended."""

    code: int
    log: str
    asked: Asked

    @classmethod
    def run(
        cls,
        master: StubMaster,
        config: Mapping[str, Any],
        slots: int = 1,
        latest_checkpoint: str | None = None,
        steps_completed: int = 0,
        timeout: float = 300.0,
    ) -> Task:
        allocation = f"trial.1.{uuid.uuid4().hex[:6]}"
        home = master.root / allocation
        for name in ("run/info", "run/train/model", "work", "../shared_fs"):
            (home / name).mkdir(parents=True, exist_ok=True)
        env = environment(master, home, allocation, full_config(config, master.root), slots)
        env["TMPDIR"] = str(storage.make_scratch(home, {}))
        if latest_checkpoint is not None:
            env |= {"DET_LATEST_CHECKPOINT": latest_checkpoint, "DET_STEPS_COMPLETED": str(steps_completed)}
        python = "python3 -m determined.exec."
        steps = (
            "set -e",
            f"{python}prep_container --download_context_directory --resources --proxy",
            "if [ -f startup-hook.sh ]; then . ./startup-hook.sh; fi",
            f"{python}prep_container --rendezvous",
            f"exec {python}launch",
        )
        process = subprocess.Popen(
            ["bash", "-c", "\n".join(steps)],
            env=env,
            cwd=home / "work",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            log, _ = process.communicate(timeout=timeout)
        finally:
            for pid in processes_of(home):  # ranks have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            storage.remove_scratch(home)
        return cls(process.returncode, log, master.asked)


def processes_of(home: Path) -> list[int]:
    """Those that were started with this task's environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if f"STUB_RUN_ROOT={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


def environment(
    master: StubMaster, home: Path, allocation: str, config: Mapping[str, Any], slots: int
) -> dict[str, str]:
    """What an agent gives to a container."""
    ports = free_ports()
    hparams = dict((config.get("hyperparameters") or {}).items())
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # native kernels that were built once are found there
        "HOME": os.environ.get("HOME", str(home)),
        "PYTHONPATH": str(master.root / "site"),
        "STUB_RUN_ROOT": str(home),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "DET_MASTER": master.url,
        "DET_CLUSTER_ID": "cluster",
        "DET_AGENT_ID": "agent",
        "DET_SLOT_IDS": json.dumps(list(range(slots))),
        "DET_TASK_ID": "trial.1",
        "DET_ALLOCATION_ID": allocation,
        "DET_SESSION_TOKEN": "token",
        "DET_USER": "determined",
        "DET_TASK_TYPE": "TRIAL",
        "DET_RESOURCES_ID": "resources",
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_CONTAINER_ID": "container",
        "DET_TRIAL_ID": "1",
        "DET_EXPERIMENT_ID": "1",
        "DET_TRIAL_SEED": "7",
        "DET_TRIAL_RUN_ID": "1",
        "DET_HPARAMS": json.dumps(hparams),
        "DET_EXPERIMENT_CONFIG": json.dumps(config),
        "DET_STEPS_COMPLETED": "0",
        "C10D_PORT": str(ports[0]),
        "INTER_TRAIN_PROCESS_COMM_PORT_1": str(ports[1]),
        "INTER_TRAIN_PROCESS_COMM_PORT_2": str(ports[2]),
    }


def full_config(config: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """``config`` with what a master fills in."""
    return {
        "checkpoint_policy": "best",
        "checkpoint_storage": {"type": "shared_fs", "host_path": str(root), "storage_path": "checkpoints"},
        "debug": False,
        "min_checkpoint_period": {"batches": 0},
        "min_validation_period": {"batches": 0},
        "optimizations": {"aggregation_frequency": 1},
        "perform_initial_validation": False,
        "profiling": {"enabled": False},
        "scheduling_unit": 100,
        **config,
        "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True, **config["searcher"]},
    }


def free_ports(count: int = 3) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports
