"""The reference page is the table."""

from __future__ import annotations

from pathlib import Path

from zero_trial.ds_config.keys_page import reference_markdown

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ds_config.md"


def test_the_page_is_up_to_date():
    """If this fails: python -m zero_trial.ds_config.keys_page docs/reference/ds_config.md"""
    assert PAGE.read_text("utf-8") == reference_markdown()
