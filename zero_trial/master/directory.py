"""The master's directory: its paths, its lock (at most one master uses the directory), and the
master's address. Only the owner of the directory can read it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.util.files import write_atomic


class MasterDirectory:
    """Provides the paths below one root directory (mode 0700), and holds its lock."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock: int | None = None

    def prepare(self) -> None:
        """Create the folders."""
        for folder in (self.root, self.allocations, self.logs):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)

    @property
    def database(self) -> Path:
        return self.root / "master.db"

    @property
    def log(self) -> Path:
        return self.root / "master.log"

    @property
    def account(self) -> Path:
        """Return the file with the name, password and token of the local user, mode 0600."""
        return self.root / "user.json"

    @property
    def storage(self) -> Path:
        """Return the folder of checkpoints, unless the experiment names another storage."""
        return self.root / "storage"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def allocations(self) -> Path:
        return self.root / "allocations"

    def allocation(self, allocation_id: str) -> Path:
        """Return the folder of one run, with its lease, exit record and working directory."""
        return self.allocations / allocation_id

    def trial_logs(self, trial_id: int) -> Path:
        """Return the folder of a trial's logs."""
        return self.logs / f"trial-{trial_id}"

    def lock(self, seconds: float = 0.0) -> bool:
        """Become the only master of this directory until this process ends; return False if there
        is another master.

        Waits up to ``seconds``, because `locked` briefly holds the lock.
        """
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    os.close(handle)
                    return False
                time.sleep(0.02)
            else:
                self._lock = handle
                return True

    def locked(self) -> bool:
        """Return whether a master is using this directory now."""
        if not self.root.is_dir():
            return False
        if self.lock():
            self.unlock()
            return False
        return True

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Record how to reach the master: pid, start, port, url, ready."""
        path = self.root / "master.json"
        write_atomic(path, json.dumps(state), durable=False, private=True)

    def state(self) -> dict[str, Any]:
        """Read the state that the last master recorded here; empty if there was none."""
        path = self.root / "master.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError("this file cannot be read", where=str(path), got=str(error), fix="Remove it.") from error
