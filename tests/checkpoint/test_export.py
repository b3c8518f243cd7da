"""Export to safetensors: what is chosen, how it is cut, and that the files are other programs'."""

from __future__ import annotations

import errno
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import zero_trial
from tests.checkpoint.test_folder import saved_by_two
from tests.engine.test_saving import FP16, Net, engine_of, train
from tests.support.pool import Pools
from zero_trial.checkpoint import export as export_module
from zero_trial.checkpoint.export import Exported, WeightSource, file_names, kinds_text, plan_export, write_export
from zero_trial.checkpoint.folder import Inventory, take_inventory
from zero_trial.checkpoint.format import FileRecord, Manifest, Slice, StoredPiece, TensorEntry
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.writer import DurableFiles, save_checkpoint
from zero_trial.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("chunk_bytes", [1, 8, 20, 1 << 20])
def test_pieces_of_several_ranks_in_order(tmp_path: Path, chunk_bytes: int) -> None:
    """Also scalars and empty tensors."""
    found = load_file(next(iter(export(saved_by_two(tmp_path), tmp_path / "out", chunk_bytes).files)))
    assert found["w"].tolist() == list(range(10)) and found["b"].tolist() == [1.0] * 3


NAMES = (
    "param/blocks.10.w",
    "param/blocks.2.w",
    "buffer/mean",
    "state/exp_avg/blocks.2.w",
    "state/max/blocks.2.w",
    "rank0/x",
)


def manifest(names: tuple[str, ...] = NAMES, dtype: str = "float32", **state: Any) -> Manifest:
    tensors = {name: TensorEntry(dtype, (2, 3), (StoredPiece("a.safetensors", name, 0, 6),)) for name in names}
    return Manifest(3, tensors, {"a.safetensors": FileRecord(1, "0" * 64)}, state=state)


def test_parameters_buffers_and_their_state() -> None:
    found = take_inventory(manifest(aliases={"head.w": "blocks.2.w"}, dtypes={"blocks.2.w": "bfloat16"}))
    assert [(held.name, held.stored) for held in found.params] == [
        ("blocks.2.w", "param/blocks.2.w"),
        ("blocks.10.w", "param/blocks.10.w"),
    ]
    assert [held.name for held in found.buffers] == ["mean"]
    assert found.params[0].states == {"exp_avg": "float32", "max": "float32"} and found.params[1].states == {}
    assert [held.lives for held in found.params] == ["bfloat16", "float32"]
    assert [held.is_master for held in (*found.params, *found.buffers)] == [True, False, False]
    assert (found.elements, found.parts, dict(found.aliases)) == (12, 1, {"head.w": "blocks.2.w"})


BF16 = {"dtypes": {"blocks.2.w": "bfloat16", "blocks.10.w": "bfloat16"}}


def inventory(**state: object) -> Inventory:
    return take_inventory(manifest(**state))


def test_masters_are_what_is_taken_unless_the_models_weights_are_asked_for() -> None:
    plan = plan_export(inventory(**BF16))
    assert [(item.name, item.dtype) for item in plan.items] == [
        ("blocks.2.w", "float32"),
        ("blocks.10.w", "float32"),
        ("mean", "float32"),
    ]
    assert plan.took == "float32 masters of 2 of 2 parameters; the model computes in bfloat16"
    plan = plan_export(inventory(**BF16), weights=WeightSource.MODEL)
    assert {item.name: item.dtype for item in plan.items} == {
        "blocks.2.w": "bfloat16",
        "blocks.10.w": "bfloat16",
        "mean": "float32",
    }
    assert plan.took == "weights in the dtype that the model computes with, bfloat16, rounded from their masters"
    assert kinds_text(item.dtype for item in plan.items) == "bfloat16, float32"
    assert plan_export(inventory(dtypes={})).took == ("weights as stored, float32; the checkpoint has no masters")
    assert "does not say in which dtype" in plan_export(inventory()).took
    assert plan_export(inventory(without_frozen=True)).took.endswith(
        "; frozen parameters were left out when it was saved"
    )


def test_a_dtype_for_all_comes_last() -> None:
    plan = plan_export(inventory(**BF16), weights=WeightSource.MODEL, dtype="float32")
    assert {(item.held, item.through, item.dtype) for item in plan.items if item.name != "mean"} == {
        ("float32", "bfloat16", "float32")
    }
    whole = take_inventory(manifest(("buffer/n",), dtype="int64"))
    assert plan_export(whole, dtype="bfloat16").items[0].dtype == "int64"


def test_tied_names_of_what_is_written() -> None:
    aliases = {"head": "blocks.2.w", "gone": "left.out", "mean": "blocks.2.w"}
    assert plan_export(inventory(aliases=aliases)).aliases == {"head": "blocks.2.w"}


@pytest.mark.parametrize(("limit", "counts"), [(None, [3]), (1, [1, 1, 1]), (48, [2, 1]), (71, [2, 1]), (72, [3])])
def test_shards_hold_at_most_the_limit_or_one_tensor(limit: int | None, counts: list[int]) -> None:
    plan = plan_export(inventory(), shard_bytes=limit)  # 24 bytes each
    assert [len(shard) for shard in plan.shards] == counts and plan.bytes == 72


def test_parts_are_exported_one_by_one() -> None:
    parted = take_inventory(manifest(("part0of2/param/w", "part1of2/param/w")))
    with pytest.raises(
        ConfigError, match=r"parallel itself.*got 2 parts\. Export each part separately: --part 0 to --part 1"
    ):
        plan_export(parted)
    assert [plan_export(parted, part=part).items[0].stored for part in (0, 1)] == [
        "part0of2/param/w",
        "part1of2/param/w",
    ]
    for part, found in ((2, parted), (-1, parted), (1, inventory())):
        with pytest.raises(ConfigError, match="no such part"):
            plan_export(found, part=part)


def test_nothing_to_write() -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        plan_export(take_inventory(manifest(("rank0/x",))))


def export(folder: Path, out: Path, chunk_bytes: int = 64, **options: Any) -> Exported:
    reader = CheckpointReader(folder)
    plan = plan_export(take_inventory(reader.manifest), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "CHUNK_BYTES", chunk_bytes)
        return write_export(reader, plan, out)


def example(folder: Path) -> Path:
    """Tensors of several dtypes and shapes in a checkpoint; ``head`` is tied to ``w``."""
    tensors = {
        "param/w": torch.arange(300.0).view(100, 3),
        "param/s": torch.tensor(1e6),
        "param/e": torch.zeros(0, 2),
        "buffer/n": torch.arange(7),
        "buffer/h": torch.ones(5, dtype=torch.float16),
    }
    slices = [Slice.whole(name, tensor) for name, tensor in tensors.items()]
    return save_checkpoint(folder, "a", slices, step=1, state={"aliases": {"head": "w"}, "dtypes": {}})


def outputs(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model.eval()
    torch.manual_seed(7)  # the dropout of Net never rests
    with torch.no_grad():
        return model(torch.linspace(-2, 2, 30, dtype=dtype).view(6, 5))


def save_at(stage: str, config: dict[str, Any], folder: str) -> torch.Tensor:
    """The engine's own outputs, by its buffers as rank 0 has them."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    engine = engine_of(stage, config)
    train(engine, range(3))
    engine.save_checkpoint(folder, tag="a")
    dtype = next(param.dtype for param in engine.module.parameters())
    return outputs(engine, dtype)


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_a_plain_model_computes_the_same_bits(ranks: Pools, stage: str, tmp_path: Path) -> None:
    expected = ranks(2).run(save_at, stage, {}, str(tmp_path))[0]
    exported = export(tmp_path / "a", tmp_path / "out")
    plain = Net()
    load_model(plain, next(iter(exported.files)), strict=True)
    assert torch.equal(outputs(plain), expected)


@pytest.mark.parametrize(("section", "dtype"), [(FP16, torch.float16)])
def test_the_models_16_bit_weights_and_their_masters(
    ranks: Pools, section: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = ranks(2).run(save_at, "zero3", section, str(tmp_path))[0]
    plain = Net().to(dtype)
    load_model(
        plain, next(iter(export(tmp_path / "a", tmp_path / "model", weights=WeightSource.MODEL).files)), strict=True
    )
    assert torch.equal(outputs(plain, dtype), expected)
    masters = load_file(next(iter(export(tmp_path / "a", tmp_path / "masters").files)))
    rounded = load_file(tmp_path / "model" / "model.safetensors")
    assert masters["first.weight"].dtype == torch.float32 and masters["frozen.weight"].dtype == dtype
    assert all(torch.equal(masters[name].to(value.dtype), value) for name, value in rounded.items())
    assert not torch.equal(masters["first.weight"], rounded["first.weight"].float())


def test_one_file_by_name(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "w.safetensors"
    exported = export(example(tmp_path), out)
    assert exported.files == {out: out.stat().st_size}
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "alias:head": "w"}
        assert sorted(file.keys()) == ["e", "h", "n", "s", "w"]
    found = load_file(out)
    assert torch.equal(found["w"], torch.arange(300.0).view(100, 3)) and found["e"].shape == (0, 2)
    assert torch.equal(found["n"], torch.arange(7)) and found["s"].shape == ()
    assert sorted(path.name for path in out.parent.iterdir()) == ["w.safetensors"]


def test_shards_with_an_index(tmp_path: Path) -> None:
    folder = example(tmp_path)
    exported = export(folder, tmp_path / "out", shard_bytes=100)
    names = [path.name for path in exported.files]
    assert names == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)] + [
        "model.safetensors.index.json"
    ]
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 1200 + 4 + 56 + 10}
    loaded: dict[str, torch.Tensor] = {}
    for name in names[:-1]:
        part = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][key] == name for key in part)
        loaded |= part
    assert set(loaded) == set(index["weight_map"]) == {"e", "h", "n", "s", "w"}
    whole = load_file(next(iter(export(folder, tmp_path / "one").files)))
    assert all(torch.equal(value, loaded[name]) for name, value in whole.items())


def test_another_dtype_and_what_it_cannot_hold(tmp_path: Path) -> None:
    exported = export(example(tmp_path), tmp_path / "out", dtype="float16")
    found = load_file(next(iter(exported.files)))
    assert {name: value.dtype for name, value in found.items() if name in "wsn"} == {
        "w": torch.float16,
        "s": torch.float16,
        "n": torch.int64,
    }
    assert exported.overflowed == {"s": 1} and found["s"].isinf()


def test_memory_stays_at_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives is counted: the tensors that are read, and those that are made of them."""
    big = torch.randn(1000, 50)
    folder = save_checkpoint(tmp_path, "a", [Slice.whole(f"param/{name}", big) for name in "abc"], step=1)
    live, most = 0, 0

    def gone(size: int) -> None:
        nonlocal live
        live -= size

    def counted(made: Any, size: int) -> Any:
        nonlocal live, most
        live += size
        most = max(most, live)
        weakref.finalize(made, gone, size)
        return made

    empty, cast = torch.empty, torch.Tensor.to
    monkeypatch.setattr(torch, "empty", lambda *args, **dtype: counted(made := empty(*args, **dtype), made.nbytes))
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, dtype: self if self.dtype == dtype else counted(made := cast(self, dtype), made.nbytes),
    )
    chunk = 4000
    export(folder, tmp_path / "out", chunk_bytes=chunk, dtype="bfloat16", shard_bytes=150_000)
    assert 0 < most <= 3 * chunk < big.numel() * 2 and live == 0


@pytest.mark.parametrize(
    "there", ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_weights_that_are_there_stay(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"already contains weights: got .*{there}"):
        file_names(tmp_path, 1)
    (tmp_path / there).unlink()
    assert file_names(tmp_path, 1) == [tmp_path / "model.safetensors"]


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="this is a file"):
        file_names(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="a single file cannot have several shards"):
        file_names(tmp_path / "x.safetensors", 2)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    folder, calls = example(tmp_path), []
    method = "rename" if at == 3 else "write"
    real = getattr(DurableFiles, method)

    def fail(self: DurableFiles, *args: Any) -> Any:
        calls.append(args)
        if len(calls) > at % 3 + (at == 3):
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return real(self, *args)

    monkeypatch.setattr(DurableFiles, method, fail)
    with pytest.raises(CheckpointError, match="could not be written: got No space left"):
        export(folder, tmp_path / "out", shard_bytes=100)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_frozen_parameters_says_so(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    engine, *_ = zero_trial.initialize(model=model, config={"train_batch_size": 4, "optimizer": {"type": "AdamW"}})
    for tag, left_out in (("whole", False), ("part", True)):
        engine.save_checkpoint(tmp_path, tag=tag, exclude_frozen_parameters=left_out)
        inventory = take_inventory(CheckpointReader(tmp_path / tag).manifest)
        assert inventory.without_frozen is left_out and len(inventory.params) == (2 if left_out else 4)
