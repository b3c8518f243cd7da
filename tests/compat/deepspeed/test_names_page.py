"""The page of DeepSpeed's names, which is written from the table."""

from __future__ import annotations

from tests.architecture.sources import ROOT
from zero_trial.compat.deepspeed.deepspeed_refused import REFUSED_MODULES
from zero_trial.compat.deepspeed.deepspeed_table import OURS
from zero_trial.compat.deepspeed.names_page import reference_markdown


def test_the_page_is_up_to_date():
    """If this fails, run
    python -m zero_trial.compat.deepspeed.names_page docs/reference/deepspeed.md"""
    assert (ROOT / "docs" / "reference" / "deepspeed.md").read_text(encoding="utf-8") == reference_markdown()


def test_every_module_is_on_the_page():
    page = reference_markdown()
    assert all(f"### {module}\n" in page for module in OURS)
    assert all(f"| `{module}` | {refused.reason}" in page for module, refused in REFUSED_MODULES.items())
