"""Which reader a path is for, plain weights, and checkpoints whose content is changed at random."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero_trial
from tests.compat.importing.checkpoints import CASES, foreign, unpack
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.compat.importing.foreign_source import find_weights, is_buffer, read_source, read_weights
from zero_trial.compat.importing.imported import ImportedState, ImportOptions, write_imported
from zero_trial.compat.importing.torch_file import UnknownObject, read_torch_file
from zero_trial.errors import CheckpointError


class Net(nn.Module):
    """A tied weight, buffers of a norm, and one that only a pattern can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(x)) * self.scale).sum()


def read(source: Path, **wishes: Any) -> ImportedState:
    path = find_weights(source)
    assert path is not None
    return read_weights(path, ImportOptions(**wishes))


def split(state: dict[str, torch.Tensor], folder: Path, ending: str) -> None:
    """Two files and an index, as Hugging Face shards weights."""
    names = sorted(state)
    parts = {f"part-{index}.{ending}": names[index::2] for index in range(2)}
    for file, own in parts.items():
        content = {name: state[name].clone() for name in own}
        save_file(content, folder / file) if ending == "safetensors" else torch.save(content, folder / file)
    stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))


def put(kind: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """``state`` as a file of this kind; what to import."""
    if kind == "safetensors":
        own = {name: value for name, value in state.items() if name != "head.weight"}
        save_file(own, folder / "model.safetensors", {"alias:head.weight": "emb.weight"})
    elif kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif kind == "nested":
        prefixed = {f"module.{name}": value for name, value in state.items()}
        torch.save({"epoch": 3, "state_dict": prefixed}, folder / "last.pt")
        return folder / "last.pt"
    else:
        split({name: value for name, value in state.items() if name != "head.weight"}, folder, kind.split()[0])
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "bin", "nested", "safetensors in parts", "bin in parts"])
def test_into_an_engine(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source, target = Net(), Net()
    source.norm.running_mean += 2
    folder = put(kind, tmp_path, dict(source.state_dict()))
    findings = read(folder, strip="module." if kind == "nested" else "", buffers=("scale",))
    assert findings.state["aliases"] == ({} if "parts" in kind else {"head.weight": "emb.weight"})
    assert len(findings.shards) == (2 if "parts" in kind else 1)
    assert findings.left_out == (["last.pt: 'epoch', beside 'state_dict'"] if kind == "nested" else [])
    assert "norm.num_batches_tracked" in findings.notes[0] and "scale" in findings.notes[0]
    write_imported(findings, tmp_path / "out", "w")
    engine, *_ = zero_trial.initialize(
        model=target, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    )
    engine.load_checkpoint(tmp_path / "out", load_module_only=True)
    found = engine.module_state_dict()
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())


def test_what_is_a_buffer() -> None:
    number, whole = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert is_buffer("bn.running_mean", number, ()) and is_buffer("position_ids", whole, ())
    assert is_buffer("a.scale", number, ("a.*",))
    assert not is_buffer("a.weight", number, ()) and not is_buffer("a.weight", number.bfloat16(), ("b.*",))


INDICES = [
    "",
    "[]",
    "{}",
    '{"weight_map": 3}',
    '{"weight_map": {"a": "../x.bin"}}',
    '{"weight_map": {"a": "none.bin"}}',
]


def test_which_file_of_a_folder_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    assert find_weights(tmp_path) is None and find_weights(tmp_path / "none") is None
    (tmp_path / "pytorch_model.bin").touch()
    assert find_weights(tmp_path) == tmp_path / "pytorch_model.bin"
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert find_weights(tmp_path) == tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "parts").mkdir()
    for text in (*INDICES, "[" * 100_000):
        (tmp_path / "parts" / "pytorch_model.bin.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="index"):
            read(tmp_path / "parts")
    for content in ([1], {"a": 1}, torch.zeros(2)):
        torch.save(content, tmp_path / "a.bin")
        with pytest.raises(CheckpointError, match=r"a\.bin: this file contains no weights"):
            read(tmp_path / "a.bin")


def test_which_reader_a_path_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, wishes = unpack("fp32-stage1-ranks2", tmp_path), ImportOptions()
    for path in (source, source / "global_step5"):
        assert read_source(path, None, wishes).kind.startswith("DeepSpeed 0.19.8")
    found = read_source(source / "global_step5" / "mp_rank_00_model_states.pt", None, wishes)
    assert found.kind == "weights, 1 file" and len(found.names(lambda name: name.startswith("param/"))) == 10
    (tmp_path / "gpt2").mkdir()
    torch.save({"a": torch.zeros(2)}, tmp_path / "gpt2" / "pytorch_model.bin")
    assert read_source(tmp_path / "gpt2" / "pytorch_model.bin", None, wishes).kind == "weights, 1 file"
    # a folder that is here has a name
    monkeypatch.chdir(source / "global_step5")
    assert read_source(Path(), None, wishes).tag == "global_step5"
    monkeypatch.chdir(tmp_path / "gpt2")
    assert read_source(Path(), None, wishes).tag == read_source(Path("pytorch_model.bin"), None, wishes).tag == "gpt2"
    save_checkpoint(tmp_path / "ours", "t", [Slice.whole("param/a", torch.zeros(2))], step=1)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "ours", "already a checkpoint of zero_trial"),
        (tmp_path / "ours" / "t", "already a checkpoint of zero_trial"),
        (tmp_path / "empty", "found nothing that can be imported: got an empty folder"),
        (tmp_path / "none", "no such file or folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_source(path, None, wishes)


def test_a_fault_of_the_reader_itself_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a fault in the reader")

    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr("zero_trial.compat.importing.foreign_source.read_weights", broken)
    with pytest.raises(TypeError, match="a fault in the reader"):
        read_source(tmp_path, None, ImportOptions())


CHANGES = 60  # for each case

JUNK: list[Any] = [
    *(None, True, -1, 3, 2**70, 1.5, float("nan"), float("inf"), "x", b"x"),
    *([], {}, (), [None], [1], [[0]], {"a": 1}, {0: None}, {1: {}}, (1, 2), (-1,), ("a",), (2**65,)),
    *(torch.zeros(0), torch.zeros(3), torch.tensor(2.0), [torch.zeros(3)]),
    *(foreign("a.b"), foreign("a.b", (1,), {"cur_scale": "x"})),
    *({"params": [0]}, [{"params": [[0]]}], [{"params": [9]}]),
]


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a file's content."""
    if isinstance(value, UnknownObject):
        value = value.state
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = dict(enumerate(value)).items()
    else:
        return [above]
    return [above, *(path for key, item in inside for path in paths(item, (*above, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``."""
    if not path:
        return new
    if isinstance(value, UnknownObject):
        return foreign(value.path, value.args, replaced(value.state, path, new))
    if isinstance(value, dict):
        return {key: replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    kind = list if isinstance(value, list) else tuple
    return kind(replaced(item, path[1:], new) if key == path[0] else item for key, item in enumerate(value))


@pytest.mark.parametrize("case", CASES)
def test_any_content_is_read_or_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpack(case, tmp_path)
    generator = random.Random(case)
    opened = cache(read_torch_file)
    changed: dict[Path, Any] = {}

    def open_changed(path: Path) -> Any:
        return changed[path] if path in changed else opened(path)

    monkeypatch.setattr("zero_trial.compat.importing.deepspeed.read_torch_file", open_changed)
    files = sorted(folder.rglob("*.pt"))
    refused = 0
    for _ in range(CHANGES):
        file = generator.choice(files)
        content = opened(file)
        place = generator.choice(paths(content))
        place = place[: generator.randint(1, max(1, len(place)))]
        changed = {file: replaced(content, place, generator.choice(JUNK))}
        try:
            read_source(folder, None, ImportOptions(with_optimizer=generator.random() < 0.8))
        except CheckpointError:
            refused += 1
        except Exception as fault:
            raise AssertionError(f"{file.name} with {place} as {changed[file]!r:.200}") from fault
    assert 0 < refused < CHANGES
