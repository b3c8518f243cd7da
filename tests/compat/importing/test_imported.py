"""What a reader has found, written as a checkpoint; counters, loss scale, groups and client state
of DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.compat.importing.checkpoints import foreign
from tests.compat.importing.test_torch_file import through
from zero_trial.checkpoint.folder import list_checkpoints
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.state_tree import decode_state, encode_state
from zero_trial.compat.importing import imported
from zero_trial.compat.importing.imported import ImportedState, ImportOptions, fresh_state, write_imported
from zero_trial.errors import CheckpointError
from zero_trial.sharding.precision import DynamicScale


def test_a_prefix_is_taken_off_where_it_is() -> None:
    assert ImportOptions(strip="module.").own("module.a.weight") == "a.weight"
    assert ImportOptions(strip="module.").own("a.module.weight") == "a.module.weight"
    assert ImportOptions().own("module.a") == "module.a"


def findings(**state: object) -> ImportedState:
    first = [Slice("param/a", (2, 3), 0, 4, torch.arange(4.0)), Slice.whole("buffer/b", torch.tensor(7))]
    second = [Slice("param/a", (2, 3), 4, 6, torch.arange(4.0, 6))]
    return ImportedState("test", "t", [first, second], fresh_state() | state, world={"zero_stage": 2})


def test_one_file_per_shard_and_no_state_of_ranks(tmp_path: Path) -> None:
    folder = write_imported(findings(client={"curve": torch.arange(3)}), tmp_path / "new")
    assert folder == tmp_path / "new" / "t" and [found.tag for found in list_checkpoints(tmp_path / "new")] == ["t"]
    reader = CheckpointReader(folder)
    reader.verify()
    assert len(reader.manifest.files) == 2 and reader.manifest.rank_state == ()
    assert torch.equal(reader.read("param/a"), torch.arange(6.0).reshape(2, 3)) and reader.read("buffer/b") == 7
    assert torch.equal(decode_state(reader.manifest.state, reader.read)["client"]["curve"], torch.arange(3))
    assert reader.manifest.world["zero_stage"] == 2


def test_what_has_the_name_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_imported(findings(), tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"a checkpoint of that name already.*--as"):
        write_imported(findings(client={"other": 1}), tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="another file or folder has the name"):
        write_imported(findings(), tmp_path, "mine")
    broken, empty = findings(), tmp_path / "empty"
    twice = ImportedState("test", "t", [*broken.shards, broken.shards[1]], broken.state)
    for made, name in ((twice, None), (broken, "../x")):  # nothing is left of a fault
        with pytest.raises(CheckpointError, match=None if name is None else "not a tag"):
            write_imported(made, empty, name)
    assert not list(empty.glob("*"))


def test_plain_values_are_what_a_checkpoint_can_hold(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, b"x", (1, {2})], 3: torch.float16}
    assert imported.plain(value) == value
    encode_state(imported.plain(value), "x")
    for other in (foreign("my.Thing"), {"a": [foreign("my.Thing")]}, {foreign("my.Thing"): 1}):
        with pytest.raises(imported.NotPlain, match=r"here.*my\.Thing"):
            imported.plain(other, "here")
    for kind in ("float64", "float32", "float16", "int64", "int8", "uint16", "bool_"):
        number = getattr(numpy, kind)(1)
        found = imported.plain(through(tmp_path, {"best": number}))["best"]
        assert found == 1 and type(found) is type(number.item())


def test_a_structure_that_grows_when_it_is_written_out() -> None:
    """A thousand million values from thirty lists: each is there twice in the next."""
    value: Any = []
    for _ in range(30):
        value = [value, value]
    with pytest.raises(imported.NotPlain, match="more than"):
        imported.plain(value)
    ring: dict[str, Any] = {}
    ring["self"] = ring
    left_out: list[str] = []
    assert imported.plain_or_none(ring, "ring", left_out) is None and len(left_out) == 1


def test_the_client_state_without_what_is_deepspeeds() -> None:
    left_out: list[str] = []
    found = imported.client_state(
        {"module": {}, "global_steps": 3, "epoch": 2, "args": foreign("argparse.Namespace")}, left_out
    )
    assert found == {"epoch": 2} and left_out == ["client state 'args': argparse.Namespace"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, 12),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, 6),
        ({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}, 3),
        (None, 3),
    ],
)
def test_micro_batches_follow_from_the_configuration(config: Any, expected: int) -> None:
    found = imported.counters(
        {"global_steps": 3, "global_samples": 48, "skipped_steps": 1, "dp_world_size": 2, "ds_config": config}
    )
    assert found == {"global_steps": 3, "global_samples": 48, "micro_steps": expected, "skipped_steps": 1}


def test_a_loss_scale_goes_on() -> None:
    """Stages 1 to 3 pickle the scaler; what it says is restored into ours. Stage 0 writes the
    numbers alone."""
    numbers = {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 4, "cur_hysteresis": 1}
    numbers |= {"dynamic": True, "scale_window": 1000}
    state = imported.loss_scaler({"loss_scaler": foreign("deepspeed.DynamicLossScaler", state=numbers)})
    scale = DynamicScale(hysteresis=2).restored(state)
    assert (scale.scale, scale.iteration, scale.last_overflow, scale.hysteresis_left) == (512.0, 9, 4, 1)
    state = imported.loss_scaler({"dynamic_loss_scale": True, "cur_scale": 64, "cur_iter": 2, "last_overflow_iter": -1})
    assert state == {"kind": "dynamic", "scale": 64.0, "hysteresis_left": 1, "iteration": 2, "last_overflow": -1}
    assert imported.loss_scaler({"dynamic_loss_scale": False, "cur_scale": 1.0}) == {"kind": "static", "scale": 1.0}
    assert imported.loss_scaler({}) == {"kind": "static", "scale": 1.0}


def test_groups_and_which_optimizer_it_was() -> None:
    adam = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    groups = [adam | {"params": [0], "step": 3, "mine": foreign("my.Thing"), "layer": 1}, adam]
    left_out: list[str] = []
    assert imported.group_settings(groups, left_out)[0] == {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "layer": 1}
    assert len(left_out) == 1 and "mine: my.Thing" in left_out[0]
    assert imported.identity(groups, {"optimizer": {"type": "Adam"}}) == {"class": "Adam", "settings": ["betas", "eps"]}
    assert imported.identity([{"lr": 1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": []}], None) == {
        "class": "optimizer of the client",
        "settings": ["dampening", "momentum", "nesterov"],
    }
    assert imported.identity([], {}) is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_the_identity_is_the_engines(kind: type[torch.optim.Optimizer]) -> None:
    """The list of settings that do not matter is the sharded optimizer's: they must be the same."""
    from zero_trial.sharding.optimizer_state import _HOW_NOT_WHAT  # the rule itself

    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    found = imported.identity(optimizer.state_dict()["param_groups"], {})
    assert found is not None and found["settings"] == sorted(set(optimizer.defaults) - _HOW_NOT_WHAT)
