"""Upload a checkpoint to a cluster's object storage in a process of its own.

Not in a thread of rank 0: Determined's storage managers put Python's random state back after an
upload, and the clouds' libraries draw from it. Training draws from it at the same time, and would
see other numbers.

    python -m zero_trial.trial.runtime.upload   started by rank 0, which writes the request to stdin
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import IO, Any, cast

from zero_trial.errors import CheckpointError


class UploadProcess:
    """Uploads folders as a storage manager of Determined's does.

    ``storage``: the experiment's ``checkpoint_storage``.
    """

    def __init__(self, storage: Mapping[str, Any]) -> None:
        self._storage = dict(storage)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Collection[str] | None = None) -> None:
        """Upload the folder ``src`` as ``dst``. Raises CheckpointError where that fails."""
        request = {"storage": self._storage, "src": os.fspath(src), "dst": dst, "paths": paths and sorted(paths)}
        # a file and no pipe, whose end would be that of every process that was forked meanwhile
        with tempfile.TemporaryFile("w+") as answer:
            with self._start(answer) as process:
                with suppress(BrokenPipeError):  # it has ended: the exit code tells
                    os.write(cast("IO[str]", process.stdin).fileno(), json.dumps(request).encode() + b"\n")
                process.wait()  # stdin stays open: where it ends, rank 0 has ended
            answer.seek(0)
            fault = answer.read()
        if process.returncode:
            raise CheckpointError(
                "a checkpoint could not be uploaded",
                where=f"checkpoint_storage of type {self._storage.get('type')}",
                got=fault.strip() or f"the uploading process ended with {process.returncode}",
                fix="Look at the storage and its credentials; the checkpoints before this one are untouched.",
            )

    def _start(self, answer: IO[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._given_up:
                raise CheckpointError("the upload was given up")
            command = [sys.executable, "-m", "zero_trial.trial.runtime.upload"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, text=True)
            return self._process

    def give_up(self) -> None:
        """End an upload that is under way, and begin none any more."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()


def main() -> int:
    """Upload what stdin asks for; print what is wrong."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    from determined.common import storage

    try:
        manager = storage.build(request["storage"], container_path=None)
        manager.upload(request["src"], request["dst"], request["paths"] and set(request["paths"]))
    except Exception as error:  # of every storage library that there is
        sys.stdout.write(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_rank_0() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
