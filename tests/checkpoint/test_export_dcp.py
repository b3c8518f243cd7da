"""A checkpoint as a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.test_dcp import load_fsdp, save_here
from tests.support.pool import Pools
from zero_trial.checkpoint import CheckpointReader
from zero_trial.checkpoint.export_dcp import dcp_state, write_dcp
from zero_trial.cli.main import main
from zero_trial.errors import ConfigError


def test_what_was_saved_here_goes_on_in_fsdp2(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks(2).run(save_here, str(tmp_path))
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    for own, theirs in zip(ranks(2).run(load_fsdp, str(tmp_path / "dcp")), expected, strict=True):
        assert own == pytest.approx(theirs, rel=1e-5)
    reader = CheckpointReader(tmp_path / "a")
    assert sorted(dcp_state(reader, with_optimizer=False)) == ["model"]
    with pytest.raises(ConfigError):
        write_dcp(reader, tmp_path / "dcp")
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "dcp", "--part", "0"]) == 2
    assert not (tmp_path / "b").exists()
