"""``zero-trial board``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.report import samples
from zero_trial.cli.main import main


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(["board", str(tmp_path / "nowhere")]) == 2
        assert main(["board", str(tmp_path), "--port", "70000"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "nowhere" in capsys.readouterr().err


def test_it_prints_its_address_and_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=200)
    words = [sys.executable, "-m", "zero_trial.cli.main", "board", str(tmp_path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, _, token = json.loads(process.stdout.readline())["board"].partition("#token=")
        request = urllib.request.Request(f"{address}/live?once=1", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b"quickstart" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
