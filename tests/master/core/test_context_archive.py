"""Model definitions become clean archives; what could lead outside never gets into one."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.master.core import context_archive
from zero_trial.master.core.context_archive import check_model, clean_path, from_model_definition
from zero_trial.master.records import Invalid


def file(path: str, content: bytes = b"", **changes: Any) -> dict[str, Any]:
    return {
        "path": path,
        "type": 48,
        "content": base64.b64encode(content).decode(),
        "mtime": "1700000000",
        "mode": 33188,
        **changes,
    }


def members(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        return {member.name: member for member in archive}


def test_files_and_directories_come_out_as_they_went_in(tmp_path: Path) -> None:
    files = [file("b/run.sh", b"echo", mode=0o100755), file("b", type=53, mode=0o40700)]
    files += [file("./a.py", b"print()"), file("empty")]
    packed = from_model_definition(files)
    assert packed == from_model_definition(files[::-1])
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert (tmp_path / "a.py").read_bytes() == b"print()"
    assert (tmp_path / "b" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "empty").read_bytes() == b""
    found = members(packed)
    assert list(found) == ["a.py", "b", "b/run.sh", "empty"]
    assert all((each.uid, each.gid) == (0, 0) for each in found.values())


def test_what_the_genuine_client_sends_is_taken(tmp_path: Path) -> None:
    context = pytest.importorskip("determined.common.context")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data.bin").write_bytes(bytes(range(256)))
    (tmp_path / "model_def.py").write_text("print()")
    (tmp_path / "link.py").symlink_to("model_def.py")
    sent = [each.to_json() for each in context.read_v1_context(tmp_path)]
    assert set(members(from_model_definition(sent))) >= {"model_def.py", "sub", "sub/data.bin", "link.py"}


NO_PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "..",
    "",
    "/",
    "//x",
    "a\\b",
    "C:\\x",
    "a\0b",
    "a\nb",
    "\x1b[2J",
]
NO_FILES = [49, 50, 51, 52, 54, 55, 83, 120, 103, 75, 76, 0x80 | 50, -1]


@pytest.mark.parametrize("path", [*NO_PATHS, "a\x7f", "\udc80", "x" * 300, "a/" * 700 + "a"])
def test_paths_that_lead_outside_or_make_no_sense_are_refused(path: str) -> None:
    with pytest.raises(Invalid):
        from_model_definition([file(path, b"x")])


@given(st.text(alphabet="ab./\\~ü \0", max_size=12))
def test_whatever_is_taken_stays_inside(path: str) -> None:
    try:
        clean = clean_path(path)
    except Invalid:
        return
    assert not clean.startswith("/")
    assert ".." not in clean.split("/")
    assert clean == "." or all(part not in ("", ".") for part in clean.split("/"))


def test_links_devices_and_modes_that_give_rights_away_are_refused() -> None:
    for kind in NO_FILES:
        with pytest.raises(Invalid, match="neither a file nor a directory"):
            from_model_definition([file("x", type=kind)])
    for mode in (0o120777, 0o020666, 0o060666, 0o010644, 0o140755, 0o104755, 0o102755, 0o106755, -1, 1 << 40):
        with pytest.raises(Invalid, match=r"'run\.sh'"):
            from_model_definition([file("run.sh", b"echo", mode=mode)])
    found = members(
        from_model_definition([file("x", mode=0o101755, uid=1000, gid=1000), file("b", type=53, mode=0o42775)])
    )
    assert (found["x"].mode, found["x"].uid, found["x"].gid, found["x"].uname) == (0o755, 0, 0, "")
    assert found["b"].mode & 0o7000 == 0  # a directory may hand on its group


@pytest.mark.parametrize(
    "files",
    [
        [file("a"), file("./a")],
        [file("a"), file("a/b")],
        [file("a/b/c"), file("a/b")],
        [file(".", b"x")],
        [{"path": "a", "content": "not base64!"}],
        [{"path": "a", "content": 7}],
        [{"path": 7}],
        ["a"],
        [file("a", mtime="soon")],
        [file("a", mode="x")],
    ],
)
def test_definitions_that_cannot_be(files: list[Any]) -> None:
    with pytest.raises(Invalid):
        from_model_definition(files)


def test_more_than_determined_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_archive, "MAX_BYTES", 1000)
    monkeypatch.setattr(context_archive, "MAX_FILES", 3)
    from_model_definition([file("a", b"x" * 1000)])
    with pytest.raises(Invalid, match=r"\.detignore"):
        from_model_definition([file("a", b"x" * 600), file("b", b"x" * 600)])
    with pytest.raises(Invalid, match="at most 3"):
        from_model_definition([file(str(number)) for number in range(4)])


TRIAL = b"""from zero_trial import ZeroTrial
class MyTrial(ZeroTrial):
    def build_training_data_loader(self): ...
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx): ...
    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"loss": 1.0}
"""
COMMAND = "python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:MyTrial"
OLD = b"import torch\nimport deepspeed\n"
LAUNCHER = "python3 -m determined.launch.deepspeed python3 -m determined.exec.harness model_def:MyTrial"


@pytest.mark.parametrize(
    ("entrypoint", "ds_config", "message"),
    [
        (COMMAND, "ds.json", None),
        (
            COMMAND.replace("model_def:", "model_deff:"),
            "ds.json",
            "module model_deff does not exist in the model definition",
        ),
        (COMMAND.replace("MyTrial", "Mine"), "ds.json", "Mine not found in ./model_def.py"),
        (COMMAND, "ds_config.json", "no such file: got ds_config.json, expected one of const.yaml, ds.json"),
        (COMMAND, "/data/ds_config.json", None),  # a mounted folder
        ("python3 train.py", "ds_config.json", None),  # not ours
        (COMMAND.replace("model_def:", "--model-dir src model_deff:"), "ds_config.json", None),
        (COMMAND.replace("MyTrial", "Mine").split(), "ds.json", "Mine not found in ./model_def.py"),
        ("python3 -m zero_trial.run deep:MyTrial", "ds.json", "Python cannot parse the file"),
        (COMMAND.replace("run model_def:MyTrial", "as_determined model_def:Mine"), "ds.json", "Mine not found in"),
        (COMMAND.replace("run model_def:MyTrial", "as_determined model_def:MyTrial"), "own.json", None),
        (COMMAND.replace("run model_def:MyTrial", "as_determined train.py"), "ds.json", None),
        (
            LAUNCHER,
            "ds.json",
            "-m zero_trial.as_determined model_def:MyTrial, so that zero_trial trains the same files",
        ),
        (f"sh -c '{LAUNCHER}'", "ds.json", None),
        (
            "old_def:MyTrial",
            "ds.json",
            "entrypoint: this imports deepspeed, which is not installed: got old_def:MyTrial",
        ),
        ("model_def:MyTrial", "ds.json", None),
    ],
)
def test_what_ranks_would_fail_on_is_refused(entrypoint: Any, ds_config: str, message: str | None) -> None:
    files = [file("model_def.py", TRIAL), file("ds.json", b"{}"), file("const.yaml", b"")]
    packed = from_model_definition([*files, file("deep.py", b"x = " + b"-" * 60_000 + b"1"), file("old_def.py", OLD)])
    config = {"entrypoint": entrypoint, "data": {"ds_config": ds_config}, "hyperparameters": {}}
    if message is None:
        check_model(config, packed)
        return
    with pytest.raises(Invalid) as refused:
        check_model(config, packed)
    assert message in str(refused.value)
