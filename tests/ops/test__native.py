"""Which kernels a process runs: as asked, and said once where they are not what could be hoped for."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import cpu_library


def without_compiler(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder), "PATH": "", **more}


def test_the_reference_can_be_asked_for(tmp_path: Path) -> None:
    chosen = cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="reference"))
    assert chosen.native is None
    assert chosen.describe() == "plain torch (ZERO_TRIAL_OPS=reference)"
    assert not list(tmp_path.iterdir())  # nothing was tried


def test_without_a_compiler_it_is_plain_torch_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        chosen = cpu_library.choose(without_compiler(tmp_path))
    assert chosen.native is None
    assert "no C++ compiler" in chosen.describe()
    assert [record.message for record in caplog.records if "plain torch" in record.message]


def test_native_is_an_error_where_it_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"ZERO_TRIAL_OPS=native: .*got no C\+\+ compiler"):
        cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="native"))


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'fast', expected auto, reference, native"):
        cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="fast"))


def test_the_choice_is_made_once() -> None:
    assert cpu_library.backend() is cpu_library.backend()


def test_this_processor_gets_a_copy_that_it_can_run() -> None:
    try:
        native = cpu_library.open_native(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)
    assert native.isa in range(len(cpu_library.ISAS))
    assert cpu_library.ISAS[native.isa] in cpu_library.Backend(native).describe()
