"""Rounds of the contenders: the same work everywhere, every contender in turn, results joined."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.contenders import Workload, missing
from benchmarks.engine import above_bare
from benchmarks.rounds import Job, _medians, run_once, run_rounds

TINY = Workload("tiny", micro_batch=4, layers=23, width=8)
GPT = Workload("gpt", micro_batch=2, sequence=16, layers=1, width=64)


def test_weights_and_batches_do_not_depend_on_the_random_state() -> None:
    for workload in (TINY, GPT):
        first, second = workload.build().state_dict(), workload.build().state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
        torch.rand(1)
        assert all(torch.equal(*pair) for pair in zip(workload.batch(1, 5), workload.batch(1, 5), strict=True))
        assert not torch.equal(workload.batch(0, 5)[0], workload.batch(1, 5)[0])


def test_the_tiny_model_has_two_tensors_per_layer() -> None:
    model = TINY.build()
    assert len(list(model.parameters())) == 46
    assert len(model.blocks) == 3  # type: ignore[arg-type]
    model(*TINY.batch(0, 0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_gpt_predicts_the_next_token_of_its_batch() -> None:
    inputs, targets = GPT.batch(0, 0)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


SMALL = Workload("tiny", micro_batch=2, layers=4, width=8)


def job(name: str, ranks: int = 2) -> Job:
    return Job(name, "fp32", SMALL, ranks, threads=1, accumulation=2, warmup=1, steps=3, timeout_seconds=120)


def test_ours_and_ddp_do_the_same_work() -> None:
    ours, ddp = run_once(job("ours-2")), run_once(job("ddp"))
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
    assert ours["losses"][-1] != ours["losses"][0]
    assert ours["parameter_tensors"] == 8
    assert ours["wall_ms"] > 0


def test_a_contender_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_rounds([job("ours-nonsense", ranks=1), job("bare", ranks=1)], rounds=1)
    assert [row["name"] for row in rows] == ["bare"]
    failed = re.search(r"(?s)failed   ours-nonsense fp32: rank 0 ended with 1\n.*ValueError", capsys.readouterr().out)
    assert failed is not None


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contenders.importlib.util.find_spec", lambda name: None)
    assert "not installed" in (missing("deepspeed-2") or "")
    assert missing("ddp") is None


def test_rounds_are_joined_by_their_median() -> None:
    rounds = [{"wall_ms": wall, "cpu_ms": 1.0, "losses": [0.5]} for wall in (30.0, 10.0, 20.0)]
    row = _medians(job("ddp"), rounds)
    assert (row["wall_ms"], row["wall_ms_min"], row["wall_ms_max"], row["rounds"]) == (20.0, 10.0, 30.0, 3)


def test_above_bare_subtracts_the_row_of_the_same_dtype() -> None:
    rows = [
        {"name": "bare", "dtype": "fp32", "cpu_ms": 10.0},
        {"name": "bare", "dtype": "bf16", "cpu_ms": 4.0},
        {"name": "ddp", "dtype": "bf16", "cpu_ms": 9.0},
        {"name": "ddp", "dtype": "fp16", "cpu_ms": 9.0},
    ]
    above_bare(rows, "cpu_ms")
    assert [row.get("cpu_ms_above_bare") for row in rows] == [None, None, 5.0, None]
