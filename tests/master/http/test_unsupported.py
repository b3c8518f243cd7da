"""What is not supported is said, and what is supported is not called unsupported."""

from __future__ import annotations

import pytest

from zero_trial.master.http.unsupported import reason


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/v1/notebooks", "not run"),
        ("/api/v1/tensorboards/7/kill", "tensorboard --logdir"),
        ("/api/v1/models/m/versions", "no model registry"),
        ("/api/v1/experiments/7/move", "one project"),
        ("/api/v1/trials/7/retain_logs", "logs are kept"),
        ("/api/v1/workspaces/1/pin", "one workspace"),
    ],
)
def test_parts_of_determined_that_are_not_here(path: str, words: str) -> None:
    assert words in (reason(path) or "")


@pytest.mark.parametrize(
    "path", ["", "/", "/api", "/api/v1", "/api/v1/inventions", "/api/v1/notebooksx", "/metadata/x"]
)
def test_what_nobody_knows_has_no_reason(path: str) -> None:
    assert reason(path) is None
