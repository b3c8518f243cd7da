"""What was found, and what was asked for."""

from __future__ import annotations

import torch

from zero_trial.checkpoint import Slice
from zero_trial.importing.imported import ImportedState, ImportOptions, fresh_state


def test_a_prefix_is_taken_off_where_it_is() -> None:
    assert ImportOptions(strip="module.").own("module.a.weight") == "a.weight"
    assert ImportOptions(strip="module.").own("a.module.weight") == "a.module.weight"
    assert ImportOptions().own("module.a") == "module.a"


def test_names_and_step() -> None:
    part = Slice("param/a", (4,), 0, 2, torch.zeros(2)), Slice("param/a", (4,), 2, 4, torch.zeros(2))
    found = ImportedState("test", "t", [[part[0]], [part[1], Slice.whole("buffer/b", torch.zeros(1))]], fresh_state())
    assert found.names(lambda name: True) == ["buffer/b", "param/a"] and found.step == 0


def test_a_fresh_state_is_one_that_an_engine_reads() -> None:
    assert fresh_state()["counters"] == dict.fromkeys(
        ("global_steps", "global_samples", "micro_steps", "skipped_steps"), 0
    )
    assert fresh_state()["client"] is not fresh_state()["client"]
