"""Plays a search by hand: trials are called 1, 2, 3 in the order of their creation, and actions are
short words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zero_trial.master.search.searcher import Action, Create, ExitReason, Searcher, Shutdown, Stop, restore

LR = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}}


class Play:
    """``+3``: trial 3 is created, ``-3``: it is told to stop, ``.``: the search is over, ``!``: it
    is over and has failed."""

    def __init__(self, search: Searcher) -> None:
        self.search = search
        self.ids: list[str] = []
        self.hparams: list[Mapping[str, Any]] = []
        self.seeds: list[int] = []

    def start(self) -> str:
        return self.words(self.search.start())

    def val(self, trial: int, time: int, loss: Any, **more: Any) -> str:
        metrics = {"loss": loss, "batches": time, **more}
        return self.words(self.search.on_validation(self.ids[trial - 1], metrics))

    def exit(self, trial: int, reason: ExitReason = ExitReason.COMPLETED) -> str:
        return self.words(self.search.on_exited(self.ids[trial - 1], reason))

    def words(self, actions: Iterable[Action]) -> str:
        return " ".join(self.word(action) for action in actions)

    def word(self, action: Action) -> str:
        if isinstance(action, Create):
            self.ids.append(action.request_id)
            self.hparams.append(action.hparams)
            self.seeds.append(action.seed)
            return f"+{len(self.ids)}"
        if isinstance(action, Stop):
            return f"-{self.ids.index(action.request_id) + 1}"
        assert isinstance(action, Shutdown)
        return "."


def twin(search: Searcher, config: Mapping[str, Any], space: Mapping[str, Any]) -> Searcher:
    """The search again, out of its snapshot as JSON text."""
    return restore(config, space, json.loads(json.dumps(search.snapshot(), allow_nan=False)))
