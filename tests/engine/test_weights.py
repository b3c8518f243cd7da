"""Models whose first values come from safetensors files, or from their modules where they were
built on the meta device."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zero_trial
from tests.support.pipelines import batches, cross_entropy, layers, make_engine
from tests.support.pool import Pools
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.pipeline import LayerSpec, PipelineModule

SECTIONS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 50},
}


FREED = {"stage3_param_persistence_threshold": 0}


class Net(nn.Module):
    """Parameters that are trained, frozen, tied, cut and too small to be freed; buffers that are
    saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40)) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2)
        self.angles = Angles()
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embed.weight


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.arange(7, out=self.table)


def on_meta(build: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return build()


def start(model: nn.Module, section: str = "zero3", mesh: dict[str, int] | None = None, **given: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": SECTIONS[section],
        "bf16": {"enabled": given.pop("bf16", False)},
        "data_types": {"keep_in_fp32_modules": given.pop("kept", [])},
        "comm_timeout_seconds": 30.0,
    }
    return zero_trial.initialize(model=model, config=config | ({"mesh": mesh} if mesh else {}), **given)[0]


def masters_and_state(engine: Any) -> list[torch.Tensor]:
    with engine.sharded.materialized():
        masters = [group.master.clone() for group in engine.sharded.groups]
    state = engine.module_state_dict()
    found = [*masters, *(value.clone() for value in state.values()), engine.module.angles.table]
    engine.destroy()
    return found


def stored(tmp_path: Path, build: type[nn.Module] = Net, **change: Any) -> Path:
    """A file with the values of a model, the tied one under its second name."""
    torch.manual_seed(5)
    state = {name: value.clone() for name, value in build().state_dict().items()}
    state.pop("embed.weight", None)
    for name, value in change.items():
        if value is None:
            del state[name.replace("__", ".")]
        else:
            state[name.replace("__", ".")] = value
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


class Counted:
    """The bytes that positioned reads bring."""

    def __init__(self) -> None:
        self.bytes = 0
        self._read = os.preadv

    def __call__(self, file: int, into: Sequence[Any], place: int) -> int:
        count = self._read(file, into, place)
        self.bytes += count
        return count


def read_and_plain(folder: Path, cases: Sequence[tuple[str, bool, dict[str, int] | None]]) -> list[Any]:
    """Whether a rank has the same bits as after ``load_state_dict``, and the bytes that it read."""
    found = []
    for section, bf16, mesh in cases:
        torch.manual_seed(5)
        plain = masters_and_state(start(Net(), section, mesh, bf16=bf16))
        counted = Counted()
        with mock.patch("os.preadv", counted):
            engine = start(on_meta(), section, mesh, bf16=bf16, weights=folder)
        own = masters_and_state(engine)
        found.append((list(map(torch.equal, plain, own)), counted.bytes))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_shards_and_each_byte_once(size: int, ranks: Pools, tmp_path: Path) -> None:
    cases: list[Any] = [(section, bf16, None) for section in SECTIONS for bf16 in (False, True)]
    if size == 4:
        cases = [("zero3", True, {"shard": 2}), ("zero2", False, {"shard": 2}), ("zero0", False, None)]
    folder = stored(tmp_path)
    file = folder / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    answers = ranks(size).run(read_and_plain, folder, cases)
    for case, of_ranks in zip(cases, zip(*answers, strict=True), strict=True):
        for same, _ in of_ranks:
            assert all(same), case
        assert sum(count for _, count in of_ranks) == file.stat().st_size - header, case


@pytest.mark.parametrize("section", ["zero0", "zero3"])
def test_what_stays_fp32_is_read_unrounded_into_a_bf16_model(section: str, tmp_path: Path) -> None:
    """A frozen module, and a block with saved buffers."""
    torch.manual_seed(5)
    whole = Net()
    whole.blocks[1][1].running_mean = torch.rand(40)  # type: ignore[index]
    plain = copy.deepcopy(whole).to(torch.bfloat16)
    plain.frozen, plain.blocks[1] = whole.frozen, whole.blocks[1]
    folder, kept = stored(tmp_path, blocks__1__1__running_mean=whole.blocks[1][1].running_mean), ["blocks.1", "frozen"]  # type: ignore[index]
    own = start(on_meta().to(torch.bfloat16), section, bf16=True, kept=kept, weights=folder)
    expected = masters_and_state(start(plain, section, bf16=True, kept=kept))
    assert all(map(torch.equal, expected, masters_and_state(own)))


def test_files_of_an_index_other_dtypes_and_a_prefix(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = Net().state_dict()
    del state["head.weight"]
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, value) in enumerate(state.items()):
        value = (
            value.to([torch.float16, torch.bfloat16, torch.float64][number % 3]) if value.is_floating_point() else value
        )
        files["ab"[number % 2] + ".safetensors"][f"net.{name}"] = value
    files["a.safetensors"]["other.head"] = torch.zeros(2)  # without the prefix: not asked for
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    listed = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    expected = Net()
    expected.load_state_dict({**state, "head.weight": state["embed.weight"]})
    for name, value in expected.state_dict().items():
        if name in state:
            value.copy_(files[listed[f"net.{name}"]][f"net.{name}"])
    own = masters_and_state(start(on_meta(), "zero1", weights=tmp_path, weights_prefix="net."))
    assert all(map(torch.equal, masters_and_state(start(expected, "zero1")), own))
    with torch.device("meta"):  # the prefix may also be that of the model
        around = nn.ModuleDict({"net": Net()})
    (tmp_path / "plain").mkdir()
    state = start(around, weights=stored(tmp_path / "plain"), weights_prefix="net.").module_state_dict()
    torch.manual_seed(5)
    assert all(torch.equal(state[f"net.{name}"], value) for name, value in Net().state_dict().items())


def refused(folder: Path) -> str:
    counted = Counted()
    with mock.patch("os.preadv", counted), pytest.raises(ConfigError) as error:
        start(on_meta(), weights=folder)
    assert counted.bytes == 0, "the difference is known before any value is read"
    return str(error.value)


def test_all_differences_come_in_one_list(ranks: Pools, tmp_path: Path) -> None:
    changes = {"frozen__bias": None, "blocks__1__1__running_var": None, "more": torch.ones(2)}
    folder = stored(tmp_path, head__weight=torch.zeros(60, 16), **changes)
    for text in ranks(2).run(refused, folder):
        for name in ("frozen.bias", "blocks.1.1.running_var", "more", "head.weight (60, 16) vs (61, 16)"):
            assert name in text


KINDS = [("int64", torch.int64), ("complex64", torch.complex64)]


def test_numbers_that_a_parameter_does_not_hold_are_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    """Before any value is read; the buffer that counts batches is an integer in both."""
    folders = []
    for name, dtype in KINDS:
        (tmp_path / name).mkdir()
        values = torch.ones(16, 16).to(dtype)
        folders.append(stored(tmp_path / name, frozen__weight=values, head__weight=torch.ones(61, 16).to(dtype)))
    for (name, _), folder in zip(KINDS, folders, strict=True):
        for text in ranks(2).run(refused, folder):
            assert f"frozen.weight: {name}" in text and f"head.weight: {name}" in text
            assert "frozen.weight: float32" in text and "num_batches" not in text


def tied_twice(folder: Path) -> tuple[list[str], list[bool], int]:
    """How a rank refuses files that have both names of the tied weight and different values, and
    what it has and has read of one where they are equal."""
    texts = []
    for name in ("last", "first"):
        with pytest.raises(CheckpointError) as error:
            start(on_meta(), weights=folder / f"{name}.safetensors")
        texts.append(str(error.value))
    torch.manual_seed(5)
    plain = masters_and_state(start(Net()))
    counted = Counted()
    with mock.patch("os.preadv", counted):
        engine = start(on_meta(), weights=folder)
    return texts, list(map(torch.equal, plain, masters_and_state(engine))), counted.bytes


def test_two_names_of_a_tied_weight_must_have_one_value(ranks: Pools, tmp_path: Path) -> None:
    """Ranks compare a part each, so one alone sees the difference and all refuse the file."""
    torch.manual_seed(5)
    right = Net().embed.weight.detach().clone()
    for name, place in {"first": 0, "last": -1}.items():
        wrong = right.clone()
        wrong[place, place] += 1.0
        stored(tmp_path, embed__weight=wrong).joinpath("model.safetensors").rename(tmp_path / f"{name}.safetensors")
    file = stored(tmp_path, embed__weight=right) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    answers = ranks(2).run(tied_twice, tmp_path)
    for texts, same, _ in answers:
        assert all("embed.weight and head.weight" in text for text in texts) and all(same)
    # the second copy was read for the comparison alone, and so was the first one once more
    assert sum(count for *_, count in answers) == file.stat().st_size - header + right.nbytes


def no_weights(folder: Path) -> list[str]:
    found = []
    for path in (folder, folder / "cut.safetensors", folder / "absent"):
        with pytest.raises(CheckpointError) as error:
            start(on_meta(), weights=path)
        found.append(str(error.value))
    return found


def test_files_that_are_not_weights_are_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    whole = (stored(tmp_path) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    for folder, cut, absent in ranks(2).run(no_weights, tmp_path):
        assert str(tmp_path) in folder and "cut.safetensors" in folder and "cut.safetensors" in cut
        assert "absent" in absent


@pytest.mark.parametrize(
    "given, where",
    [
        ({"weights": ""}, "initialize(weights)"),  # not the working directory
        ({"weights": b"folder"}, "initialize(weights)"),
        ({"weights": 3}, "initialize(weights)"),
        ({"weights": "folder", "weights_prefix": None}, "initialize(weights_prefix)"),
        ({"weights_prefix": "model."}, "initialize(weights_prefix)"),
    ],
)
def test_what_names_no_weights_is_refused(
    given: dict[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        start(on_meta(), **given)
    assert error.value.where == where


def pipelined(folder: Path, cases: Sequence[tuple[int, bool]]) -> list[dict[str, Any]]:
    """What a rank of a pipeline has of the file's values."""
    found = []
    for stage, meta in cases:
        build = layers(2)
        if meta:  # what is no layer of its own is built on the meta device before the pipeline is
            with torch.device("meta"):
                build = [part.build() if type(part) is LayerSpec else part for part in build]
        engine = make_engine(build, 2, {"stage": stage, **FREED}, 1, weights=folder)
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with engine.sharded.materialized():
            masters = [group.master.clone() for group in engine.sharded.groups]
        engine.train_batch(batches(engine.mpu.get_data_parallel_rank(), 1, 1))
        engine.destroy()
        plain = make_engine(layers(2), 2, {"stage": stage, **FREED}, 1)
        plain.load_module_state_dict(state)
        with plain.sharded.materialized():
            same = list(map(torch.equal, masters, (group.master for group in plain.sharded.groups)))
        plain.destroy()
        found.append({"state": state, "same": same})
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_stages_of_a_pipeline_read_their_own_layers(size: int, ranks: Pools, tmp_path: Path) -> None:
    """Beside ZeRO stages, with a tied layer on the first and the last stage."""
    torch.manual_seed(5)
    whole = PipelineModule(layers(2), num_stages=1, loss_fn=cross_entropy).state_dict()
    values = {name: torch.rand_like(value) for name, value in whole.items()}
    save_file(values, tmp_path / "model.safetensors")
    cases = [(1, True), (3, True)] if size == 4 else [(1, False)]
    for number in range(len(cases)):
        seen = set()
        for answer in (each[number] for each in ranks(size).run(pipelined, tmp_path, cases)):
            assert all(torch.equal(value, values[name]) for name, value in answer["state"].items())
            assert all(answer["same"]) and answer["same"]
            seen |= answer["state"].keys()
        assert seen == values.keys()


def on_first_rank(cases: Sequence[tuple[type[nn.Module], str, dict[str, int] | None]]) -> list[list[bool]]:
    """Compare models that every rank has built with those that rank 0 alone has."""
    found = []
    for build, section, mesh in cases:
        results = []
        for alone in (False, True):
            torch.manual_seed(5)
            model = on_meta(build) if alone and dist.get_rank() else build()
            if alone and dist.get_rank() == 1:  # as transformers leaves them: buffers have values
                model.blocks[1][1].register_buffer("running_mean", torch.ones(40))
            results.append(masters_and_state(start(model, section, mesh)))
        found.append(list(map(torch.equal, *results)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_values_of_rank_0_alone_are_those_of_all(size: int, ranks: Pools) -> None:
    cases: list[Any] = [(Net, section, None) for section in SECTIONS]
    if size == 4:
        cases = [(Net, "zero3", {"shard": 2}), (Net, "zero1", None)]
    for answer in ranks(size).run(on_first_rank, cases):
        assert all(map(all, answer)), answer


def unequal(how: str) -> str:
    rank = dist.get_rank()
    model = Net() if rank == 0 else on_meta()
    if how == "dtype" and rank == 0:
        model = model.bfloat16()
    elif how == "ties" and rank == 1:
        model.head.weight = nn.Parameter(torch.empty(61, 16, device="meta"))
    elif how == "lacks" and rank == 0:
        model.frozen = on_meta(lambda: nn.Linear(16, 16)).requires_grad_(False)
    elif how == "other rank":
        model = on_meta() if rank == 0 else Net()
    with pytest.raises(ConfigError) as error:
        start(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dtype", ["embed.weight", "torch.float32", "torch.bfloat16"]),
        ("ties", ["head.weight", "on rank 1"]),
        ("lacks", ["rank 0: 2 (frozen.bias", "rank 1:"]),
        ("other rank", ["rank 0:", "rank 1: 0"]),
    ],
)
def test_ranks_whose_models_lack_other_values_are_refused_alike(ranks: Pools, how: str, words: list[str]) -> None:
    for text in ranks(2).run(unequal, how):
        assert all(word in text for word in words), text


class Bare(nn.Module):
    """Parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))
        self.register_buffer("mask", torch.ones(3))
        self.fine = nn.Linear(3, 4)


def bare(**given: Any) -> tuple[str, str]:
    real = nn.Linear(2, 2)
    before = real.weight.detach().clone()
    with pytest.raises(ConfigError) as error:
        start(nn.Sequential(real, on_meta(Bare)), **given)
    assert torch.equal(real.weight, before)
    return str(error.value), str(error.value.where)


def test_parameters_without_values_are_refused_by_name(ranks: Pools) -> None:
    for text, where in ranks(2).run(bare):
        assert where == "initialize(model)" and "1.fine.bias, 1.fine.weight" in text and "Pass weights=" in text
