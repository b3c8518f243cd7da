"""The last lines of a run."""

from __future__ import annotations

from zero_trial.launch.summary import summary_lines

REPEAT = "zero-trial run runs/0001/config.lock.yaml"


def test_a_whole_summary():
    summary = {
        "train_seconds": 41.3,
        "ranks": 2,
        "zero_stage": 2,
        "seed": 7,
        "tokens_per_second": 9812.0,
        "samples_per_second": 9.0,
        "initial_validation": {"val_bits_per_byte": 8.04},
        "final_validation": {"val_bits_per_byte": 3.123},
        "unigram_bits_per_byte": 4.61,
        "xz_bits_per_byte": 2.31,
        "peak_memory_bytes": [60 * 2**20, 61 * 2**20],
    }
    assert summary_lines(summary, REPEAT) == [
        "done    41 s · val_bits_per_byte 8.04 -> 3.123 (unigram 4.61, xz 2.31) · 9.8k tok/s · peak 61.0 MiB/rank · 2 ranks · ZeRO-2 · seed 7",
        f"repeat  {REPEAT}",
    ]


def test_nothing_is_made_up():
    assert summary_lines({}, REPEAT)[0] == "done    finished"
    assert (
        summary_lines({"train_seconds": 7200, "final_validation": {"acc": 0.5}, "ranks": 1}, REPEAT)[0]
        == "done    2:00:00 · acc 0.5 · 1 rank"
    )
