"""The search between events."""

from __future__ import annotations

import pytest

from tests.master.fakes import experiment, tgz
from zero_trial.master.core.context_archive import read_context
from zero_trial.master.core.state import new_searcher
from zero_trial.master.search import Create, ExitReason, restore


def test_small_configuration_files_of_a_context_are_read() -> None:
    found = read_context(
        tgz({"./ds_config.json": b"{}", "deep/a.yaml": b"a: 1", "model.py": b"pass", "startup-hook.sh": b""})
    )
    assert found.files == {"ds_config.json": b"{}", "deep/a.yaml": b"a: 1"} and found.has_hook
    assert not read_context(tgz({"deep/startup-hook.sh": b""})).has_hook and not read_context(b"").has_hook


def test_a_searcher_goes_on_where_it_was() -> None:
    random = {"name": "random", "metric": "val", "max_trials": 3, "max_concurrent_trials": 1}
    config = experiment(searcher=random, hyperparameters={"a": {"type": "double", "minval": 0.0, "maxval": 1.0}})
    first = new_searcher(config)
    start = first.start()
    assert isinstance(start[0], Create)
    again = restore(config["searcher"], config["hyperparameters"], first.snapshot())
    name = start[0].request_id
    assert again.on_exited(name, ExitReason.COMPLETED) == first.on_exited(name, ExitReason.COMPLETED)


@pytest.mark.parametrize(("seed", "same"), [(7, True), (8, False)])
def test_the_seed_decides(seed: int, same: bool) -> None:
    space = {"a": {"type": "double", "minval": 0.0, "maxval": 1.0}}
    random = {"name": "random", "metric": "val", "max_trials": 1}
    one, two = (
        new_searcher(
            experiment(searcher=random, hyperparameters=space, reproducibility={"experiment_seed": number})
        ).start()[0]
        for number in (7, seed)
    )
    assert isinstance(one, Create) and isinstance(two, Create) and (one.hparams == two.hparams) == same
