"""Documents: values with the places where they stand, and the forms in which they arrive."""

from __future__ import annotations

import base64
import copy
import os
from pathlib import Path
from typing import Any

import pytest

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.schema.config_source import open_source, read_file, read_text
from zero_trial.schema.document import Document, Location, Provenance, ValueSource


@pytest.fixture
def document() -> Document:
    places = {("a",): Location("f.yaml", 2), ("a", "b"): Location("f.yaml", 3), ("a", "b", "c"): Location("f.yaml", 4)}
    return Document({"a": {"b": {"c": 1}, "d": 2}}, places, Location("f.yaml"))


def test_a_key_has_the_place_of_its_nearest_parent(document: Document):
    assert document.at(("a", "b", "c")).line == 4
    assert document.at(("a", "d")).line == 2
    assert document.at(("z",)) == Location("f.yaml")


def test_with_value_leaves_the_old_one_alone(document: Document):
    changed = document.with_value(("a", "b", "c"), 5, Location(note="auto: x"))
    assert (changed.get(("a", "b", "c")), document.get(("a", "b", "c"))) == (5, 1)
    assert changed.at(("a", "b", "c")).source() == "auto: x"
    assert document.with_value(("n", "m"), 1, Location()).get(("n", "m")) == 1
    assert document.with_value(("a", "d", "x"), 1, Location()).get(("a", "d")) == {"x": 1}


def test_below_names_faults_by_the_whole_path(document: Document):
    inner = document.below(("a", "b"))
    assert inner.value == {"c": 1}
    assert inner.at(("c",)).where("c") == "f.yaml:4 a.b.c"
    assert document.below(("a",), "other").at(("b",)).where("b") == "f.yaml:3 other.b"
    assert document.below(("nothing",)).value == {}


@pytest.mark.parametrize(
    ("place", "where", "source"),
    [
        (Location(), "k", "given"),
        (Location("f.json", 3), "f.json:3 k", "f.json:3"),
        (Location("f.json"), "f.json k", "f.json"),
        (
            Location("c.yaml", 3, "hyperparameters.ds_config"),
            "c.yaml:3 hyperparameters.ds_config.k",
            "c.yaml:3 hyperparameters.ds_config",
        ),
        (Location("f.json", 3, note="auto: lr"), "f.json:3 k", "auto: lr (f.json:3)"),
        (Location(note="filled", provenance=Provenance.AUTO), "k", "filled"),
        (Location("f.json", 3).noted("filled", Provenance.AUTO), "f.json:3 k", "filled (f.json:3)"),
    ],
)
def test_places_in_words(place: Location, where: str, source: str):
    assert place.where("k") == where
    assert place.source() == source


@pytest.mark.parametrize("deep", [dict, list])
def test_a_configuration_nested_too_deep_or_that_multiplies_is_refused(deep: type):
    value: Any = 1
    for _ in range(5000):
        value = {"a": value} if deep is dict else [value]
    with pytest.raises(ConfigError, match="too deeply nested or too large"):
        read_ds_config({"optimizer": value})
    inside: dict[str, Any] = {}
    inside["optimizer"] = inside
    with pytest.raises(ConfigError, match="too deeply nested or too large"):
        Document.of(inside)
    value = 1
    for _ in range(40):
        value = {"a": value, "b": value} if deep is dict else [value, value]
    with pytest.raises(ConfigError, match="too deeply nested or too large"):
        read_ds_config({"optimizer": value})


@pytest.mark.parametrize(
    ("text", "provenance"),
    [
        ("default (null in a.json:3)", Provenance.DEFAULT),
        ("auto: hyperparameter lr (a.json:3)", Provenance.AUTO),
        ("auto: left to zero_trial", Provenance.OPEN),
        ("hyperparameter global_batch_size", Provenance.HYPERPARAMETER),
        ("derived: 2 x 2 x 2 ranks", Provenance.DERIVED),
        ("written as fp32_allreduce (a.json:3)", Provenance.REWRITTEN),
        ("const.yaml:9 hyperparameters.ds_config", Provenance.OVERLAY),
        ("PipelineModule(num_stages=2)", Provenance.MODEL),
        ("ds_config.json:3", Provenance.GIVEN),
        ("given", Provenance.GIVEN),
    ],
)
def test_the_text_of_an_old_report_has_its_provenance(text: str, provenance: Provenance):
    source = ValueSource(text)
    assert source == text and source.provenance is provenance and copy.deepcopy(source).provenance is provenance


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
    with pytest.raises(ConfigError, match="this is a folder"):
        open_source(str(tmp_path))
    with pytest.raises(ConfigError, match=f"ds_confg.json: no such file in {Path.cwd()}"):
        open_source("ds_confg.json")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\. Give the file in it"):
        read_text(tmp_path)


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
