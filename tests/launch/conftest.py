"""The run that others are compared with, made once."""

from __future__ import annotations

import pytest

from tests.launch.programs import Unbroken, processes_of, write_project, zero_trial


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    write_project(folder)
    done = zero_trial("run", "const.yaml", "model", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert processes_of(folder) == []
    return Unbroken(folder, done)
