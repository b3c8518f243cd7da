"""The forms in which a ds_config arrives."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import open_source, read_file
from zero_trial.schema.document import Document


def test_a_file_a_dict_text_and_base64_are_the_same(tmp_path: Path):
    text = '{"train_batch_size": 4}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    with os.scandir(tmp_path) as entries:
        (entry,) = entries  # any other path
    for source in ({"train_batch_size": 4}, path, str(path), entry, text, encoded, Document({"train_batch_size": 4})):
        assert open_source(source).value == {"train_batch_size": 4}


def test_names_in_messages(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1}')
    assert open_source(path).at(("a",)).spot() == "ds.json:1"
    assert open_source(path, "mine").at(("a",)).spot() == "mine:1"
    assert open_source({"a": 1}).at(("a",)).spot() == ""


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path):
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        open_source(str(tmp_path / "ds_confg.json"))
    assert str(error.value) == f'{tmp_path}/ds_confg.json: no such file. Did you mean "ds_config.json"?'


@pytest.mark.parametrize(
    "source", ["", "nothing/at/all.json", "A" * 5000, "x\0y", base64.urlsafe_b64encode(b"[1]").decode()]
)
def test_text_that_is_no_source(source: str):
    with pytest.raises(ConfigError, match="no such file"):
        open_source(source)


@pytest.mark.parametrize("source", [3, None, ["a"]])
def test_other_types(source: Any):
    with pytest.raises(ConfigError, match="expected a dict, a path, or base64"):
        open_source(source)


def test_a_file_of_another_encoding_says_which(tmp_path: Path):
    """PowerShell's ``>`` writes UTF-16."""
    for name, encoding, found in (("a.json", "utf-16", "UTF-16"), ("b.yaml", "cp1252", "another encoding")):
        (tmp_path / name).write_bytes('{"name": "é"}'.encode(encoding))
        code = "UTF-16" if found == "UTF-16" else "ITS_ENCODING"
        with pytest.raises(ConfigError, match=f"got {found}, expected UTF-8. Save it as UTF-8: iconv -f {code} -t"):
            read_file(tmp_path / name)


def test_a_file_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    for path in (tmp_path / "bad.json", tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_file(path)
