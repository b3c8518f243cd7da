"""A Determined cluster as a platform: metrics, checkpoints, preemption and progress of one trial
over a core.Context.

The classes import nothing from Determined: they receive a context, so a test can pass its own. Only
the functions at the end import Determined, and two of them run in separate processes:

    python -m zero_trial.trial.runtime.determined upload        started by rank 0
    python -m zero_trial.trial.runtime.determined prepare ...   before a trial of the master starts
"""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runs.events import ENGINE_GROUP, PROGRESS, join_memory
from zero_trial.trial.runtime.protocols import Distributed, OpenCheckpoint, on_rank_0
from zero_trial.util.files import remove_folder
from zero_trial.util.text import spell_nonfinite

# core copies TensorBoard files at most once a second, and skips earlier requests
_TENSORBOARD_SECONDS = 1.1

Show = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class TrialFacts:
    """Facts about this task's trial from the master."""

    trial_id: str
    experiment_id: str
    seed: int
    hparams: Mapping[str, Any]
    experiment: Mapping[str, Any]
    latest_checkpoint: str | None = None
    steps_completed: int = 0


def _is_complete(folder: Path) -> bool:
    """Return whether core has written its last file into a checkpoint's folder."""
    try:
        json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError):
        return False
    return True


class UploadProcess:
    """Uploads folders to object storage like Determined's storage managers, in a separate process.

    Not in a thread of rank 0: Determined's storage managers restore Python's random state after an
    upload, and cloud libraries draw from it. Training draws from it at the same time, and would get
    other numbers. ``storage``: the experiment's ``checkpoint_storage``.
    """

    def __init__(self, storage: Mapping[str, Any]) -> None:
        self._storage = dict(storage)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Collection[str] | None = None) -> None:
        """Upload the folder ``src`` as ``dst``. Raises CheckpointError if the upload fails."""
        request = {"storage": self._storage, "src": os.fspath(src), "dst": dst, "paths": paths and sorted(paths)}
        # a file, not a pipe: every process forked in the meantime would keep the pipe's end open
        with tempfile.TemporaryFile("w+") as answer:
            with self._start(answer) as process:
                with suppress(BrokenPipeError):  # it has exited: see its exit code
                    os.write(cast("IO[str]", process.stdin).fileno(), json.dumps(request).encode() + b"\n")
                process.wait()  # keep stdin open: EOF would mean that rank 0 has exited
            answer.seek(0)
            fault = answer.read()
        if process.returncode:
            raise CheckpointError(
                "a checkpoint could not be uploaded",
                where=f"checkpoint_storage of type {self._storage.get('type')}",
                got=fault.strip() or f"the uploading process ended with {process.returncode}",
                fix="Check the storage and its credentials; earlier checkpoints are unaffected.",
            )

    def _start(self, answer: IO[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._given_up:
                raise CheckpointError("the upload was cancelled")
            command = [sys.executable, "-m", "zero_trial.trial.runtime.determined", "upload"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, text=True)
            return self._process

    def give_up(self) -> None:
        """Stop an upload in progress, and refuse to start another."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()


@dataclass(frozen=True)
class DeterminedCheckpoints:
    """Stores checkpoints in checkpoint_storage and registers them with the master under a UUID.

    All ranks write into rank 0's folder. On a file system that the hosts share, that folder is the
    checkpoint itself. Otherwise it is temporary and uploaded afterward, so all ranks must be on one
    host. ``storage``: the experiment's ``checkpoint_storage``.
    """

    core: Any
    distributed: Distributed
    storage: Mapping[str, Any] = field(default_factory=dict)

    def begin(self, metadata: Mapping[str, Any]) -> OpenCheckpoint:
        """Collective. Enter core's context manager on rank 0 only. The commit exits it, which
        uploads and reports without communication between ranks, so a thread can run it."""
        block, process = ExitStack(), UploadProcess(self.storage)
        manager: Any = getattr(self.core.checkpoint, "_storage_manager", None)
        temporary = manager is not None and not manager.store_path_is_direct_access()

        def enter() -> list[str]:
            if temporary:
                block.callback(setattr, manager, "upload", manager.upload)
            own, storage_id = block.enter_context(self.core.checkpoint.store_path(dict(metadata), shard=False))
            if temporary:
                manager.upload = process.upload
            return [str(own), storage_id]

        path, storage_id = on_rank_0(self.distributed, enter)

        def commit() -> None:
            try:
                block.close()
            except BaseException:
                # core deletes nothing, and the master may have registered complete checkpoints
                if temporary or not _is_complete(Path(path)):
                    remove_folder(Path(path))
                raise

        def remove() -> None:
            error = CheckpointError("the checkpoint was cancelled")
            block.__exit__(type(error), error, None)
            remove_folder(Path(path))

        return OpenCheckpoint(self.distributed, Path(path), storage_id, commit, remove, process.give_up, uploads=True)

    @contextmanager
    def restore_path(self, storage_id: str) -> Iterator[Path]:
        """Collective. Download once per host if the storage is not a file system."""
        restoring = self.core.checkpoint.restore_path(storage_id)
        try:
            path = restoring.__enter__()
        except Exception as error:  # from any storage library
            raise CheckpointError(
                f"could not fetch the checkpoint ({type(error).__name__}: {error})",
                where=f"rank {self.distributed.rank}, {storage_id}",
                fix="Inspect it with det checkpoint describe; its storage must be reachable from here.",
            ) from error
        try:
            yield Path(path)
        finally:
            restoring.__exit__(None, None, None)

    def retain(self, storage_ids: Sequence[str]) -> None:
        """Do nothing: the master collects garbage by the policy of checkpoint_storage."""


@dataclass
class TensorboardSync:
    """Copies TensorBoard files to the storage, and makes sure that the last ones are copied.

    The ranks of a host share a folder, so the first rank of each host copies it: rank 0 copies
    everything, the first ranks of other hosts copy their traces.
    """

    core: Any
    rank: int
    local_rank: int
    mangler: Callable[[Path, int], Path] | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _last: float = -math.inf

    def __call__(self) -> None:
        now = self.clock()
        if now - self._last >= _TENSORBOARD_SECONDS and self._has_files():
            self._last = now
            self._copy()

    def close(self) -> None:
        """Copy files written since the last copy, after the wait that core requires."""
        if self._has_files():
            self.sleep(max(0.0, self._last + _TENSORBOARD_SECONDS - self.clock()))
            self._copy()

    def _has_files(self) -> bool:
        if self.local_rank != 0:
            return False
        path = Path(self.core.train.get_tensorboard_path())
        return path.is_dir() and any(path.iterdir())

    def _copy(self) -> None:
        more = {} if self.mangler is None else {"mangler": self.mangler}
        self.core.train.upload_tensorboard_files(lambda path: self.rank == 0 or not path.match("*tfevents*"), **more)


@dataclass(frozen=True, kw_only=True)
class DeterminedPlatform(TrialFacts):
    """One rank's view of its trial on a cluster.

    ``claim(name)``: whether this rank is the first of all ranks to ask for ``name``.
    """

    core: Any
    distributed: Distributed
    show: Show
    claim: Callable[[str], bool]
    tensorboard: TensorboardSync
    model_dir: Path = Path()
    _progress: dict[str, Any] = field(default_factory=dict)  # of the newest ``train`` event

    @property
    def tensorboard_path(self) -> Path:
        return Path(self.core.train.get_tensorboard_path())

    @cached_property
    def checkpoints(self) -> DeterminedCheckpoints:
        return DeterminedCheckpoints(self.core, self.distributed, self.experiment.get("checkpoint_storage") or {})

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report to the master. A thread of core sends the metrics; if that fails, the next report
        raises. Learning rate, gradient norm, and throughput go into the group ENGINE_GROUP: the
        training group contains only the trial's own metrics."""
        self.core.train.report_training_metrics(steps_completed, spell_nonfinite(metrics))
        if self._progress:
            self.core.train.report_metrics(ENGINE_GROUP, steps_completed, spell_nonfinite(self._progress))

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self.core.train.report_validation_metrics(steps_completed, spell_nonfinite(metrics))

    def report_progress(self, fraction: float) -> None:
        self.core.train.report_progress(min(max(fraction, 0.0), 1.0))

    def emit(self, event: Mapping[str, Any]) -> None:
        """Print the event to the task's log, without paths, which mean nothing outside the task."""
        if event.get("kind") == "train":
            self._progress.clear()
            self._progress.update((name, event[name]) for name in PROGRESS if name in event)
        self.show({name: value for name, value in event.items() if name != "path"})

    def should_preempt(self) -> bool:
        return bool(self.distributed.broadcast(self.distributed.rank == 0 and self.core.preempt.should_preempt()))

    def resumed_at(self, checkpoint: str, step: int) -> DeterminedPlatform:
        """Return the same trial, continuing from one of its own checkpoints."""
        return replace(self, latest_checkpoint=checkpoint, steps_completed=step)

    def started_from(self, named: str | Path, note: Callable[[str], None]) -> DeterminedPlatform:
        """Return the same trial, starting from another checkpoint of the cluster, given by UUID."""
        return replace(self, latest_checkpoint=str(named))

    def best_validation(self) -> float | None:
        """Return the best value in the whole experiment, according to the master."""
        best = self.core.train.get_experiment_best_validation()
        return None if best is None else float(best)

    def sync_tensorboard(self) -> None:
        self.tensorboard()

    def profile_system(self) -> bool:
        self.core.profiler.on()
        return True

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Write the whole trial's figures into its metadata, under ``zero_trial``, next to the
        user's; rank 0 only. Of measured memory, keep the maximum over its runs.

        The figures are only informative: if the master rejects them, a line is logged and the trial
        continues.
        """
        try:
            kept = self.core.train.get_metadata() or {}
            joined = join_memory(figures, [kept.get("zero_trial") or {}])
            self.core.train.set_metadata({**kept, "zero_trial": spell_nonfinite(joined)})
        except Exception as error:  # from any HTTP library
            self.emit(
                {"kind": "note", "message": f"the master did not store metadata ({type(error).__name__}: {error})"}
            )

    def report_early_exit(self, reason: str) -> None:
        if self.claim("early exit"):
            self.core.train.report_early_exit(f"EXITED_REASON_{reason}")


def installed() -> bool:
    """Return whether Determined can be imported, without importing it."""
    return find_spec("determined") is not None


def trial_facts() -> TrialFacts | None:
    """Return the master's facts about this trial; None off a cluster."""
    if not installed():
        return None
    import determined

    info = determined.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    trial = info.trial
    return TrialFacts(
        trial_id=str(trial.trial_id),
        experiment_id=str(trial.experiment_id),
        seed=trial.trial_seed,
        hparams=trial.hparams,
        experiment=trial._config,
        latest_checkpoint=info.latest_checkpoint,
        steps_completed=trial._steps_completed,
    )


def require_facts() -> TrialFacts:
    """Return ``trial_facts``. Raises ConfigError that names the missing part."""
    if not installed():
        raise ConfigError(
            "Determined is not installed in this image",
            where="cluster",
            fix="pip install 'zero_trial[determined]' in startup-hook.sh.",
        )
    facts = trial_facts()
    if facts is None:
        raise ConfigError("this is not a trial task of a Determined cluster", where="cluster")
    return facts


@contextmanager
def open_platform(
    distributed: Distributed,
    claim: Callable[[str], bool],
    show: Show,
    *,
    launched: bool,
    core_context: Any = None,
) -> Iterator[DeterminedPlatform]:
    """Collective. Open this trial's platform, with its own core.Context unless one is given. A
    given context stays open afterward.

    ``launched``: a launch layer has set the rank variables, so there may be several ranks.
    """
    from determined.tensorboard.util import get_rank_aware_path

    facts = require_facts()
    with ExitStack() as stack:
        core = stack.enter_context(_open_core(launched)) if core_context is None else core_context
        sync = TensorboardSync(core, distributed.rank, distributed.local_rank, get_rank_aware_path)
        yield DeterminedPlatform(
            **vars(facts),
            core=core,
            distributed=distributed,
            show=show,
            claim=claim,
            tensorboard=sync,
            model_dir=Path.cwd(),
        )
        sync.close()


def _open_core(launched: bool) -> Any:
    """Open a core.Context: rank 0 asks about preemption, `TensorboardSync` uploads."""
    import determined
    from determined import core

    info = determined.get_cluster_info()
    if not launched and info is not None and len(info.container_addrs) * len(info.slot_ids) > 1:
        raise ConfigError(
            "a task with several slots was started as one process",
            where="entrypoint",
            got=f"{len(info.container_addrs) * len(info.slot_ids)} slots",
            fix="Put python3 -m determined.launch.torch_distributed before the command.",
        )
    return core.init(
        distributed=core.DistributedContext.from_torch_distributed() if launched else None,
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    )


def invalid_hp_class() -> type[BaseException] | None:
    """Return Determined's InvalidHP; None without Determined."""
    if not installed():
        return None
    import determined

    kind: type[BaseException] = determined.InvalidHP
    return kind


def harness_bases() -> tuple[type, type]:
    """Return the harness's base classes of trials and controllers."""
    import determined

    return determined.LegacyTrial, determined.TrialController


def upload() -> int:
    """Upload the folders requested on stdin; print errors."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    from determined.common import storage

    try:
        manager = storage.build(request["storage"], container_path=None)
        manager.upload(request["src"], request["dst"], request["paths"] and set(request["paths"]))
    except Exception as error:  # from any storage library
        sys.stdout.write(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_rank_0() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


_PREPARE_SECONDS = 1800.0  # the retries of a core.Context take about as long
_PAUSE_SECONDS = 1.0


def prepare() -> None:
    """Prepare a trial under the embedded master, with the options of
    ``determined.exec.prep_container``. Raises its error; if the master is unreachable, only after
    half an hour.

    Determined's own preparation gives up after about a minute without a master, and immediately if
    the connection breaks during some of its requests. A running trial retries for half an hour. The
    preparation is repeated for the same time, so that a trial survives a restart of the master at
    any moment.
    """
    from determined.common.api.errors import BadRequestException, MasterNotFoundException

    until = time.monotonic() + _PREPARE_SECONDS
    while True:
        try:
            runpy.run_module("determined.exec.prep_container", run_name="__main__", alter_sys=True)
            return
        except BadRequestException as error:
            # no connection, or a broken one; other subclasses are responses of the master
            if type(error) not in (BadRequestException, MasterNotFoundException) or time.monotonic() > until:
                raise
            sys.stderr.write(f"the master is not reachable, retrying the preparation: {error}\n")
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    sys.exit({"upload": upload, "prepare": prepare}[sys.argv.pop(1)]())
