"""One cell of the oracle's matrix, and that a wrong one is called so."""

from __future__ import annotations

from benchmarks import pipeline_oracle
from benchmarks.pipeline_oracle import TOLERANCE, Case, run
from tests.support.pool import Pools


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
