"""The master's folder."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.directory import MasterDirectory

HOLD = """
import sys
import threading
from pathlib import Path
from zero_trial.master.directory import MasterDirectory
print(MasterDirectory(Path(sys.argv[1])).lock(), flush=True)
sys.stdin.read()
"""


def test_one_master_at_a_time_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    home = MasterDirectory(tmp_path)
    home.prepare()
    assert not MasterDirectory(tmp_path / "other").locked() and not home.locked()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "True\n"
    assert home.locked() and not home.lock()
    child.kill()
    child.wait()
    assert home.lock() and MasterDirectory(tmp_path).locked()
    home.unlock()
    assert not home.locked()


def test_it_is_its_owners_alone_and_its_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    home = MasterDirectory(tmp_path / "a" / "root")
    home.prepare()
    assert home.state() == {}
    home.write_state({"port": 5})
    assert home.state() == {"port": 5}
    file = home.root / "master.json"
    assert (stat.S_IMODE(home.root.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)
    file.write_text("half a fi")
    with pytest.raises(ConfigError, match=r"master\.json"):
        home.state()
    paths = [home.database, home.log, home.account, home.storage, home.allocation("1.t.1"), home.trial_logs(3)]
    assert all(path.is_relative_to(home.root) for path in paths) and len(set(paths)) == len(paths)


def test_a_start_waits_for_a_process_that_only_looked(tmp_path: Path) -> None:
    holder, home = MasterDirectory(tmp_path), MasterDirectory(tmp_path)
    holder.prepare()
    assert holder.lock()
    letting_go = threading.Timer(0.1, holder.unlock)
    letting_go.start()
    assert home.lock(seconds=30)
    letting_go.join()
    home.unlock()
