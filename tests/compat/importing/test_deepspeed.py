"""DeepSpeed's checkpoints, resumed by our engine: which files belong together, and what is in
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.importing.checkpoints import CASES, TOLERANCE, go_on, losses, model_content, resumed, unpack
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.compat.importing.deepspeed import read_deepspeed, read_universal
from zero_trial.compat.importing.deepspeed_files import ModelStates, find_deepspeed
from zero_trial.compat.importing.imported import ImportedState, ImportOptions, fresh_state, write_imported
from zero_trial.errors import CheckpointError


def put(zero: Path, name: str, **kinds: Any) -> None:
    (zero / name).mkdir(parents=True)
    for kind, value in kinds.items():
        torch.save(value, zero / name / f"{kind}.pt")


def read(zero: Path, with_optimizer: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    content = model_content({"a": torch.zeros(2, 2), "b": torch.zeros(3)}, param_shapes=[{"a": (2, 2)}, {"b": (3,)}])
    wishes, state = ImportOptions(with_optimizer), fresh_state()
    state["counters"]["global_steps"] = 7
    found = read_universal(zero, ModelStates([content], wishes, "test.pt"), wishes, state, [])
    return {part.name: part.tensor for part in found}, state


def test_both_ways_of_writing_a_tensor(tmp_path: Path) -> None:
    """In a dict with the axis of its parts, and, from stage 3, flat and bare."""
    put(
        tmp_path,
        "a",
        fp32={"cat_dim": 0, "param": torch.ones(2, 2)},
        exp_avg={"param": torch.full((2, 2), 2.0)},
        step=torch.tensor(4.0),
    )
    put(tmp_path, "b", fp32=torch.arange(3.0), exp_avg=torch.zeros(3))
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "step": 5, "params": [1]}]
    torch.save({"param_groups": groups}, tmp_path / "optimizer_state.pt")
    found, state = read(tmp_path)
    assert found.keys() == {"param/a", "state/exp_avg/a", "param/b", "state/exp_avg/b"}
    assert torch.equal(found["state/exp_avg/a"], torch.full((2, 2), 2.0)) and torch.equal(
        found["param/b"], torch.arange(3.0)
    )
    assert state["scalars"] == {"0": {"step": 4.0}, "1": {"step": 5.0}} and state["kinds"] == ["exp_avg"]
    assert [group["lr"] for group in state["groups"]] == [0.1, 0.2]
    assert read(tmp_path, with_optimizer=False)[0].keys() == {"param/a", "param/b"}


def test_what_does_not_fit(tmp_path: Path) -> None:
    put(tmp_path, "a", fp32=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"b: a parameter has no values: got no fp32\.pt"):
        read(tmp_path)
    put(tmp_path, "b", fp32=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"not this parameter's state: got shape \(4,\), expected \(3,\)"):
        read(tmp_path)
    put(tmp_path / "steps", "a", fp32=torch.zeros(4), exp_avg=torch.zeros(4))
    put(tmp_path / "steps", "b", fp32=torch.zeros(3), exp_avg=torch.zeros(3))
    content = model_content({"module.a": torch.zeros(2)}, param_shapes=[{"module.a": (2,)}])
    put(tmp_path / "prefix", "module.a", fp32=torch.ones(2))  # a folder with a prefix
    wishes = ImportOptions(strip="module.")
    found = read_universal(tmp_path / "prefix", ModelStates([content], wishes, "test.pt"), wishes, fresh_state(), [])
    assert {part.name for part in found} == {"param/a"}
    _, state = read(tmp_path / "steps")  # where no step is written, it is the number of steps
    assert state["scalars"] == {"0": {"step": 7.0}, "1": {"step": 7.0}} and len(state["groups"]) == 2
    torch.save([1], tmp_path / "optimizer_state.pt")
    with pytest.raises(CheckpointError, match="not a dict"):
        read(tmp_path)


def read_folder(source: Path, **wishes: Any) -> ImportedState:
    folder = find_deepspeed(source, None)
    assert folder is not None
    return read_deepspeed(folder, ImportOptions(**wishes))


def imported(name: str, folder: Path, **wishes: Any) -> Path:
    return write_imported(read_folder(unpack(name, folder), **wishes), folder / "out", "new")


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_there(name: str, tmp_path: Path) -> None:
    kind = name[:4]
    imported(name, tmp_path)
    engine = resumed({"0": 2, "1": 3, "2": 0, "3": 1}[name[10]], kind)
    path, client = engine.load_checkpoint(tmp_path / "out")
    assert path == str(tmp_path / "out" / "new")
    assert client == {"note": "five", "epoch": 3, "curve": client["curve"]} and torch.equal(
        client["curve"], torch.arange(3)
    )
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (5, 60, 0)
    found, expected = go_on(engine), losses(name)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE[kind]


def test_the_losses_differ(tmp_path: Path) -> None:
    """Without the moments, or with a tensor that is not the right one, they are others by far."""
    imported("fp32-stage2-ranks3", tmp_path)
    expected = losses("fp32-stage2-ranks3")
    afresh, changed = resumed(0, "fp32"), resumed(0, "fp32")
    afresh.load_checkpoint(tmp_path / "out", load_optimizer_states=False)
    changed.load_checkpoint(tmp_path / "out")
    with torch.no_grad():
        changed.module.out.bias += 1e-3
    for engine in (afresh, changed):
        assert max(abs(a - b) for a, b in zip(go_on(engine), expected, strict=True)) > 100 * TOLERANCE["fp32"]


def test_what_a_checkpoint_says(tmp_path: Path) -> None:
    findings = read_folder(unpack("bf16-stage1-ranks3", tmp_path))
    assert (
        findings.kind == "DeepSpeed 0.19.8, ZeRO stage 1, 3 ranks"
        and findings.step == 5
        and findings.tag == "global_step5"
    )
    assert findings.left_out == ["client state 'where': pathlib.PurePosixPath"]
    state = findings.state
    assert state["aliases"] == {"head.weight": "emb.weight"} and state["kinds"] == ["exp_avg", "exp_avg_sq"]
    assert state["scalars"] == {"0": {"step": 5.0}, "1": {"step": 5.0}} and state["scheduler"] == {
        "last_batch_iteration": 4
    }
    assert [group["weight_decay"] for group in state["groups"]] == [0.1, 0.0]
    assert state["optimizer"] == {"class": "AdamW", "settings": ["betas", "eps"]}
    dtypes = {part.name: part.dtype for shard in findings.shards for part in shard}
    assert dtypes["param/body.weight"] == torch.float32  # the master
    assert dtypes["param/frozen.weight"] == torch.bfloat16 and dtypes["buffer/seen"] == torch.int64
    assert "param/head.weight" not in dtypes and "buffer/passing" not in dtypes
    assert len(findings.shards) == 3 and all(findings.shards)


@pytest.mark.parametrize(
    "name", ["fp32-stage0-ranks2", "bf16-stage0-ranks1", "fp32-stage2-ranks3", "fp32-stage3-ranks2-universal"]
)
def test_weights_alone(name: str, tmp_path: Path) -> None:
    """They are the whole import's, but for stage 0 in 16 bit, whose masters belong to the
    optimizer."""
    whole = CheckpointReader(imported(name, tmp_path / "whole"))
    alone = CheckpointReader(imported(name, tmp_path / "alone", with_optimizer=False))
    assert alone.shapes == {key: shape for key, shape in whole.shapes.items() if not key.startswith("state/")}
    for key in alone.shapes:
        wanted = whole.read(key)
        assert torch.equal(alone.read(key), wanted.to(alone.read(key).dtype))
    engine = resumed(0, name[:4])
    with pytest.raises(CheckpointError, match="a different number of optimizer groups"):
        engine.load_checkpoint(tmp_path / "alone" / "out")
    engine.load_checkpoint(tmp_path / "alone" / "out", load_module_only=True)


def test_files_that_are_missing(tmp_path: Path) -> None:
    source = unpack("fp32-stage2-ranks3", tmp_path)
    for path in source.rglob("*optim*"):
        path.unlink()
    findings = read_folder(source)
    assert (
        any("the files *_optim_states.pt are missing" in line for line in findings.left_out)
        and not findings.state["kinds"]
    )
    assert len(findings.names(lambda name: name.startswith("param/"))) == 9
    for rank in (0, 1):
        source = unpack("fp32-stage3-ranks2", tmp_path / str(rank))
        next(source.rglob(f"*rank_{rank}_*optim*")).unlink()
        with pytest.raises(CheckpointError, match=r"a rank's file is missing|some ranks' files are missing"):
            read_folder(source)
    next(source.rglob("*optim*")).unlink()
    with pytest.raises(CheckpointError, match="ZeRO stage 3 without its optimizer files"):
        read_folder(source)


def test_a_prefix_and_files_that_are_not_deepspeeds(tmp_path: Path) -> None:
    """The prefix is taken off wherever a name has it: here one that the model has itself."""
    findings = read_folder(unpack("fp32-stage2-ranks3", tmp_path / "body"), strip="body.")
    assert {"param/weight", "param/bias", "state/exp_avg/weight"} <= set(findings.names(lambda name: True))
    (tmp_path / "other").mkdir()
    tmp_path /= "other"
    torch.save([1], tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="not a file of DeepSpeed"):
        read_folder(tmp_path)
    torch.save({"module": None}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="the file of model states contains no weights"):
        read_folder(tmp_path)


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
    with pytest.raises(CheckpointError, match="a parameter has no values: got a"):
        states(model_content({"a": torch.zeros(0)})).weights(set(), sharded=True)
    with pytest.raises(CheckpointError, match="the file of model states contains no weights: got module is NoneType"):
        states({"module": None})
    model = states(model_content({"a": torch.zeros(2, 3), "sharded": torch.zeros(0)}))
    model.check_shapes({"a": (2, 3), "sharded": (4,)})
    for shapes in ({"a": (3, 2)}, {"b": (2,)}):
        with pytest.raises(CheckpointError, match="differs between the module and the optimizer"):
            model.check_shapes(shapes)
    content = model_content({"module.a": torch.zeros(2), "a": torch.ones(3)})
    assert set(states(content).tensors) == {"module.a", "a"}
    with pytest.raises(CheckpointError, match="two tensors have the same name"):
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
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", "rank's file is missing: got no file of rank 2"),
    ],
)
def test_what_is_not_imported(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=word):
        find_deepspeed(make(tmp_path, *STAGE_2, name), None)


@pytest.mark.parametrize("kind", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_two_files_of_one_rank(tmp_path: Path, kind: str) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", kind):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="two files are of the same rank"):
        find_deepspeed(tmp_path, None)
