"""The reference page is the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.ds_config.keys_page import main, reference_markdown
from zero_trial.ds_config.table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ds_config.md"


def test_the_page_is_up_to_date():
    """If this fails: python -m zero_trial.ds_config.keys_page docs/reference/ds_config.md"""
    assert PAGE.read_text("utf-8") == reference_markdown()


def test_every_key_is_on_it():
    page = reference_markdown()
    for row in TABLE.values():
        assert f"| `{row.path}`" in page
        assert row.meaning in page
    assert "### `optimizer.type: AdamW`" in page and "### `scheduler.type: OneCycle`" in page


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "a" / "page.md"
    assert main([str(target)]) == 0
    assert target.read_text("utf-8") == reference_markdown()
    assert main([]) == 0
    assert capsys.readouterr().out == reference_markdown()
