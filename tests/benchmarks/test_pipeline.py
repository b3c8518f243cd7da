"""The pipeline benchmark's layers, contenders and rows; and one cell of the oracle's matrix."""

from __future__ import annotations

import pytest
import torch

from benchmarks import pipeline_oracle
from benchmarks.pipeline import WORKER, PipelineJob, row_of, theory
from benchmarks.pipeline_oracle import TOLERANCE, Case, run
from benchmarks.pipeline_worker import ROWS, WIDTH, Layer, Times, batches, layers, missing
from benchmarks.rounds import run_once
from tests.support.pool import Pools
from zero_trial.pipeline.channel import to_payload
from zero_trial.pipeline.stage import SplitBackward, StageBoundary

TEN = Times(0.01, 0.01, 0.01)


def job(name: str, times: Times = TEN, ranks: int = 2, micro_batches: int = 8) -> PipelineJob:
    return PipelineJob(name, ranks, micro_batches, times, warmup=1, steps=2, timeout_seconds=120)


@pytest.mark.parametrize(
    ("schedule", "ranks", "ideal", "bubble"),
    [
        ("1f1b", 2, 9 * 30, 1 / 9),
        ("gpipe", 4, 11 * 30, 3 / 11),
        ("interleaved", 2, 8.5 * 30, 1 / 17),
        ("zb_v", 2, 24.5 * 10, 1 / 49),
    ],
)
def test_theory(schedule: str, ranks: int, ideal: float, bubble: float) -> None:
    found = theory(schedule, job("x", ranks=ranks))
    assert found == (pytest.approx(ideal), pytest.approx(bubble))


def test_a_row_compares_with_its_own_ideal_and_with_1f1b() -> None:
    walls = [{"wall_ms": wall, "losses": [0.5]} for wall in (300.0, 270.0, 250.0)]
    row = row_of(job("ours-zb_v"), walls)
    assert (row["wall_ms"], row["wall_ms_min"], row["wall_ms_max"]) == (270, 250, 300)
    assert row["over_ideal"] == pytest.approx(270 / 245) and row["over_1f1b"] == 1
    assert row["bubble_measured"] == pytest.approx(100 / 9)
    assert row_of(job("deepspeed"), walls)["ideal_ms"] == 270


def test_layers_wait_where_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("benchmarks.pipeline_worker.time.sleep", waits.append)
    layer = Layer(Times(1, 2, 3))
    anchor = torch.zeros((), requires_grad=True)
    gate = StageBoundary(to_payload(torch.ones(ROWS, WIDTH).requires_grad_())[1], anchor)
    out = layer(gate.open())
    assert waits == [1]
    assert gate.node is not None
    split = SplitBackward([out], gate.node, anchor)
    split.inputs([torch.ones_like(out)])
    assert waits == [1, 2]
    split.weights()
    assert waits == [1, 2, 3] and layer.weight.grad is not None
    assert sum(one.times.total for one in layers(2, 2, TEN)) == pytest.approx(2 * TEN.total)


def test_ours_and_torchs_do_the_same_work() -> None:
    none = Times(0.0, 0.0, 0.0)
    ours, other = (run_once(job(name, none, micro_batches=4), WORKER) for name in ("ours-1f1b", "torch-1f1b"))
    # Of torch's pipeline only the last rank knows its loss, and the mean over both is half of it.
    assert ours["losses"] == pytest.approx([2 * loss for loss in other["losses"]], rel=1e-5)
    assert len(batches(4, 0)) == 4 and not torch.equal(batches(1, 0)[0][0], batches(1, 1)[0][0])


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pipeline_worker.importlib.util.find_spec", lambda name: None)
    assert "not installed" in (missing("deepspeed") or "")
    assert missing("torch-1f1b") is None


def test_one_cell(ranks: Pools) -> None:
    found = run(Case("zb_h1", stages=2, shards=1, zero=2, micro_batches=4), 3, ranks, {})
    assert found["difference"] <= TOLERANCE and found["ties"] and found["loss_difference"] < 1e-6


def test_another_reference_is_far_off(ranks: Pools) -> None:
    """The dense run of two data-parallel lines is none for a pipeline that sees one of them."""
    known: dict[object, object] = {}
    run(Case("1f1b", 2, 1, 0, 1), 3, ranks, known)
    (key,) = known
    known[key] = pipeline_oracle.train_dense(pipeline_oracle.layers(pipeline_oracle.BLOCKS), 3, 1, 2)
    found = run(Case("1f1b", 2, 1, 0, 1), 3, ranks, known)
    assert found["difference"] > 100 * TOLERANCE
    assert found["loss_difference"] > 1e-3
