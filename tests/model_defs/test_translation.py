"""The translation experiment: T5's arithmetic, and a run from the words of a command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_defs.folder import ROOT, import_from
from zero_trial.errors import ConfigError

model_def = import_from("translation", "model_def")
PAD, T5, LibraryT5, build_model = model_def.PAD, model_def.T5, model_def.LibraryT5, model_def.build_model
mean, trimmed = model_def.mean, model_def.trimmed

SHAPE: dict[str, Any] = {"vocabulary": 50, "layers": 2, "heads": 4, "width": 32, "hidden": 48, "dropout": 0.0}


def sample(length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources of several lengths, and the decoder's inputs."""
    torch.manual_seed(1)
    source, inputs = torch.randint(2, 50, (3, length)), torch.randint(2, 50, (3, length - 2))
    source[1, 4:], source[2, length - 3 :], inputs[:, 0] = PAD, PAD, PAD
    return source, inputs


@torch.no_grad()
def test_no_token_sees_what_comes_after_it() -> None:
    model, (source, inputs) = T5(**SHAPE), sample()
    other = inputs.clone()
    other[:, 6:] = 7
    first, second = (model(source, given)[0] for given in (inputs, other))
    assert torch.equal(first[:, :6], second[:, :6])
    assert not torch.equal(first[:, 6:], second[:, 6:])


@torch.no_grad()
def test_padding_changes_nothing_and_memory_stands_for_the_source() -> None:
    model, (source, inputs) = T5(**SHAPE), sample()
    scores, memory = model(source, inputs)
    alone, _ = model(trimmed(source[1:2]), inputs[1:2])
    assert trimmed(source[1:2]).shape == (1, 4)
    torch.testing.assert_close(scores[1:2], alone)
    torch.testing.assert_close(model(source, inputs, memory)[0], scores)


@torch.no_grad()
def test_places_count() -> None:
    """Without positions an encoder would not see the order of its tokens."""
    model, (source, inputs) = T5(**SHAPE), sample()
    assert not torch.allclose(model(source.flip(1), inputs)[0], model(source, inputs)[0], atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is in the extra 'libraries'")
def test_it_is_the_t5_of_transformers() -> None:
    """All buckets of relative positions, scores and gradients."""
    own, (source, inputs) = T5(**SHAPE), sample(200)
    library = build_model("auto", **SHAPE)
    assert isinstance(library, LibraryT5)
    library = LibraryT5(own, **SHAPE)
    scores, _ = own(source, inputs)
    theirs, their_memory = library(source, inputs)
    torch.testing.assert_close(scores, theirs)
    torch.testing.assert_close(library(source, inputs, their_memory)[0], theirs)
    for found in (scores, theirs):
        found.square().mean().backward()
    named = dict(library.t5.named_parameters())
    assert set(named) == {name for name, _ in own.named_parameters()}
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, msg=name)


def test_another_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hyperparameters\.model\.implementation"):
        build_model("t5", **SHAPE)


def test_a_mean_is_over_tokens() -> None:
    assert mean([[6.0, 2], [1.0, 5]]) == 1.0


WORDS = {"one": "un", "two": "deux", "three": "trois", "four": "quatre", "five": "cinq", "six": "six"}


@pytest.mark.smoke
def test_the_words_of_a_command_line_train_it(tmp_path: Path) -> None:
    """Two ranks at stage 3, where all of them take part in every forward pass of decoding."""
    lines = [" ".join(words) for words in ((a, b, c, d) for a in WORDS for b in WORDS for c in WORDS for d in WORDS)]
    (tmp_path / "x.en").write_text("\n".join(lines))
    (tmp_path / "x.fr").write_text("\n".join(" ".join(WORDS[word] for word in line.split()) for line in lines))
    steps, model = 60, "hyperparameters.model"
    command = [sys.executable, str(ROOT / "model_defs/translation/train.py"), "task=nlp/translation"]
    command += ["dataset=nlp/translation/wmt16", "trainer=deepspeed_offload", "zero_optimization.stage=3"]
    command += [f"data.source={tmp_path}", f"searcher.max_length.batches={steps}", "data.validation_pairs=32"]
    command += [f"min_validation_period.batches={steps}", "perform_initial_validation=true"]
    command += [
        f"scheduler.params.total_num_steps={steps}",
        "scheduler.params.warmup_num_steps=5",
        "optimizer.params.lr=0.01",
    ]
    command += [f"{model}.vocabulary=280", f"{model}.layers=1", f"{model}.width=32", f"{model}.hidden=64"]
    command += [f"{model}.implementation=own", "hyperparameters.max_tokens=8", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["step"], summary["zero_stage"], summary["ranks"]) == (steps, 3, 2)
    assert (summary["data"]["source"], summary["most_frequent_bleu"]) == ("wmt16 en-fr", 0.0)
    first, last = summary["initial_validation"], summary["final_validation"]
    assert last["validation_loss"] < first["validation_loss"] - 3
    assert last["val_bits_per_token"] == pytest.approx(last["validation_loss"] / 0.6931471805599453)
    assert last["bleu"] >= summary["copy_bleu"] == 0
