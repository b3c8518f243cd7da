"""The text template learns on a small text, from the files that ``init`` writes to a summary."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cli.templates.short import train_made
from zero_trial.cli.templates.text.model_def import BYTES, LanguageModel

SENTENCES = "the quick brown fox jumps over the lazy dog and runs away from {} hounds\n"


def test_it_learns(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    summary = train_made(tmp_path, "text", 40, {"source": str(text)}, {"sequence": 32, "layers": 1, "width": 32})
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert (summary["step"], summary["data"]["files"]) == (40, 12)


def test_no_byte_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(sequence=8, layers=2, heads=2, width=16)
    inputs = torch.randint(BYTES, (1, 8))
    other = inputs.clone()
    other[0, 5:] += 1
    losses = [model(x % BYTES, torch.where(torch.arange(8) < 5, inputs, -100)) for x in (inputs, other)]
    assert torch.equal(losses[0], losses[1])
