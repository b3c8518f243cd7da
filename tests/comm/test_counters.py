"""Tests for zero_trial/comm/collective.py."""

from __future__ import annotations

from zero_trial.comm.collective import CommCounters, Traffic


def test_traffic_is_summed_by_kind_and_axis() -> None:
    counters = CommCounters()
    counters.add("reduce_scatter", "shard", 300, 4)
    counters.add("reduce_scatter", "shard", 100, 2)
    counters.add("all_reduce", "replica", 8, 4)
    assert counters.get("reduce_scatter", "shard") == Traffic(calls=2, elements=400, bytes=1400)
    assert counters.table() == {
        "all_reduce/replica": {"calls": 1, "elements": 8, "bytes": 32},
        "reduce_scatter/shard": {"calls": 2, "elements": 400, "bytes": 1400},
    }


def test_asking_for_what_never_happened_is_zero_and_leaves_no_trace() -> None:
    counters = CommCounters()
    assert counters.get("broadcast", "data") == Traffic()
    assert counters.table() == {}


def test_totals_are_over_axes() -> None:
    counters = CommCounters()
    counters.add("all_reduce", "shard", 1, 8)
    counters.add("all_reduce", "replica", 10, 4)
    counters.add("all_gather", "shard", 100, 4)
    assert counters.total() == Traffic(3, 111, 448)
    assert counters.total("all_reduce") == Traffic(2, 11, 48)
    assert counters.total("all_reduce", "all_gather") == Traffic(3, 111, 448)
    assert counters.total(min_elements=10) == Traffic(2, 110, 440)
    assert counters.total("send") == Traffic()


def test_reset_and_copies() -> None:
    counters = CommCounters()
    counters.add("all_reduce", "shard", 1, 8)
    table = counters.table()
    table["all_reduce/shard"]["calls"] = 7
    assert counters.get("all_reduce", "shard").calls == 1
    counters.reset()
    assert counters.total() == Traffic()
