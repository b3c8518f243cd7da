"""DeepSpeed's files: which belong together, and the weights in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.importing.checkpoints import model_content
from zero_trial.compat.importing.deepspeed_files import ModelStates, find_deepspeed
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.errors import CheckpointError


def states(*contents: dict[str, Any], **wishes: Any) -> ModelStates:
    return ModelStates(list(contents), ImportOptions(**wishes), "test.pt")


def test_parameters_buffers_and_ties() -> None:
    weight = torch.ones(2, 2)
    content = model_content({"a": weight, "mean": torch.zeros(2), "c": torch.zeros(3)}, ("mean",))
    content["module"] |= {"b": content["module"]["a"], "_extra_state": {"x": 1}}
    model = states(content)
    assert model.parameters == ["a", "c"] and model.aliases == {"b": "a"} and model.not_tensors == ["_extra_state"]
    (row,) = model.weights({"c"}, sharded=False)
    assert [part.name for part in row] == ["param/a", "buffer/mean"]


def test_what_deepspeed_lists_as_shared() -> None:
    model = states(
        model_content({"x.a": torch.zeros(2), "x.b": torch.zeros(2)}, shared_params={"x.b": "x.a"}), strip="x."
    )
    assert model.aliases == {"b": "a"} and model.parameters == ["a"]


def test_frozen_parameters_of_stage_3_are_in_parts() -> None:
    """Seven elements on two ranks: four, three and one of padding."""
    contents = [
        model_content(
            {"frozen": torch.zeros(0), "none": torch.zeros(0)},
            frozen_param_shapes={"frozen": (7,), "none": (0, 3)},
            frozen_param_fragments={"frozen": torch.arange(rank * 4.0, rank * 4 + 4), "none": torch.zeros(0)},
        )
        for rank in range(2)
    ]
    rows = states(*contents).weights(set(), sharded=True)
    assert [(part.name, part.start, part.stop) for part in rows[0]] == [("param/frozen", 0, 4), ("param/none", 0, 0)]
    assert torch.equal(rows[1][0].tensor, torch.tensor([4.0, 5, 6]))


def test_what_the_files_of_model_states_lack() -> None:
    empty = model_content({"frozen": torch.zeros(0)}, frozen_param_shapes={"frozen": (7,)})
    with pytest.raises(CheckpointError, match=r"a part of a frozen parameter is missing: got frozen, rank 0"):
        states(empty, empty).weights(set(), sharded=True)
    with pytest.raises(CheckpointError, match="there are no values of a parameter: got a"):
        states(model_content({"a": torch.zeros(0)})).weights(set(), sharded=True)
    with pytest.raises(CheckpointError, match="no weights in the file of model states: got module is NoneType"):
        states({"module": None})
    model = states(model_content({"a": torch.zeros(2, 3), "sharded": torch.zeros(0)}))
    model.check_shapes({"a": (2, 3), "sharded": (4,)})
    for shapes in ({"a": (3, 2)}, {"b": (2,)}):
        with pytest.raises(CheckpointError, match="differs in the module and the optimizer"):
            model.check_shapes(shapes)
    content = model_content({"module.a": torch.zeros(2), "a": torch.ones(3)})
    assert set(states(content).tensors) == {"module.a", "a"}
    with pytest.raises(CheckpointError, match="two tensors have one name"):
        states(content, strip="module.")


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


STAGE_2 = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
)


def found_in(source: Path, tag: str | None = None) -> str:
    found = find_deepspeed(source, tag)
    assert found is not None
    return found.path.name


def test_which_folder_is_meant(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b", *STAGE_2)
    make(tmp_path / "a", *STAGE_2)
    assert found_in(tmp_path / "a") == found_in(tmp_path) == "a"
    for tag in ("c", "..", "a/b", ""):
        with pytest.raises(CheckpointError, match=r"no such tag: got .*, expected one of: a"):
            find_deepspeed(tmp_path, tag)
    make(tmp_path / "b", *STAGE_2)
    with pytest.raises(CheckpointError, match=r"several checkpoints.*got a, b.*Choose one with --tag"):
        find_deepspeed(tmp_path, None)
    (tmp_path / "latest_universal").write_text("b")
    assert found_in(tmp_path) == "b"
    (tmp_path / "latest").write_text("a\n")
    assert found_in(tmp_path) == "a" and found_in(tmp_path, "b") == "b"
    found = find_deepspeed(tmp_path, None)
    assert found is not None and found.universal is None
    assert [path.name for path in (*found.models, *found.optimizers)] == list(STAGE_2)
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    found = find_deepspeed(make(tmp_path / "many", "mp_rank_00_model_states.pt", *names), None)
    assert found is not None and [path.name for path in found.optimizers] == names, "in the order of their numbers"
    make(tmp_path / "universal" / "zero" / "a.weight", "fp32.pt")
    found = find_deepspeed(make(tmp_path / "universal", "mp_rank_00_model_states.pt"), None)
    assert found is not None and found.universal == tmp_path / "universal" / "zero"
    other = make(tmp_path / "other", "model.safetensors")
    assert [find_deepspeed(path, None) for path in (other, other / "model.safetensors", other / "none")] == [None] * 3


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("mp_rank_01_model_states.pt", "parallel parts"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "parallel parts"),
        ("layer_03-model_00-model_states.pt", "a pipeline's layers"),
        ("layer_03-model_states.pt", "a pipeline's layers"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", "rank's file is missing: got none of rank 2"),
    ],
)
def test_what_is_not_imported(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=word):
        find_deepspeed(make(tmp_path, *STAGE_2, name), None)


@pytest.mark.parametrize("kind", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_two_files_of_one_rank(tmp_path: Path, kind: str) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", kind):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="two files are of one rank"):
        find_deepspeed(tmp_path, None)
