"""TensorBoard events, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.engine.monitors import TensorBoard

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")


def test_what_is_written_can_be_read(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "job")
    board.write([("Train/Samples/train_loss", 2.5, 8), ("Train/Samples/train_loss", 2.0, 16)])
    board.flush()
    board.close()
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")] == [(8, 2.5), (16, 2.0)]
