"""state_dict() and load_state_dict() of parts of a sharded module, in a world of one rank (whose
parameters are freed all the same)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_trial
from zero_trial.sharding.param_group import ParamGroup


def engine(stage: int = 3) -> zero_trial.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    return zero_trial.initialize(model=model, config=config)[0]


def live(found: zero_trial.Engine) -> list[bool]:
    return [group.live for group in found.sharded.groups]


def test_a_part_hands_out_whole_tensors_of_its_own():
    found = engine()
    assert not any(live(found))
    state = found.module[1].state_dict()
    assert state["0.weight"].shape == (8, 8) and torch.isfinite(state["0.weight"]).all()
    assert state["1.num_batches_tracked"].item() == 0
    assert not any(live(found)), "what was opened for the state dict is closed again"
    whole = found.module.state_dict()
    torch.testing.assert_close(whole["1.0.weight"], state["0.weight"], rtol=0, atol=0)
    assert not any(live(found))


def test_an_error_while_loading_leaves_a_module_that_works():
    found = engine()
    with pytest.raises(RuntimeError, match="size mismatch"):
        found.module[1].load_state_dict({"0.weight": torch.ones(3)}, strict=False)
    found.module[2].register_load_state_dict_pre_hook(_refuse)
    with pytest.raises(KeyError):
        found.module.load_state_dict(found.module.state_dict())
    state = found.module.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values())
    found.backward(found(torch.ones(2, 4)).sum())
    found.step()
    assert all(torch.isfinite(value).all() for value in found.module[1].state_dict().values())


def _refuse(*_: object) -> None:
    raise KeyError("not this one")


@pytest.mark.parametrize("how", ["state_dict", "load_state_dict"])
def test_one_group_at_a_time_is_whole(how: str, monkeypatch: pytest.MonkeyPatch):
    found = engine()
    most = 0
    finish = ParamGroup.finish_unshard

    def watched(group: ParamGroup) -> None:
        nonlocal most
        finish(group)
        most = max(most, sum(live(found)))

    state = found.module.state_dict()
    monkeypatch.setattr(ParamGroup, "finish_unshard", watched)
    if how == "state_dict":
        found.module.state_dict()
    else:
        found.module.load_state_dict(state)
    assert len(found.sharded.groups) > 1 and most == 1
