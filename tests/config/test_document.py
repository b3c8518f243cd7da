"""Documents: values with the places where they stand."""

from __future__ import annotations

import pytest

from zero_trial.config.document import Document, Place, twice


@pytest.fixture
def document() -> Document:
    places = {("a",): Place("f.yaml", 2), ("a", "b"): Place("f.yaml", 3), ("a", "b", "c"): Place("f.yaml", 4)}
    return Document({"a": {"b": {"c": 1}, "d": 2}}, places, Place("f.yaml"))


def test_a_key_has_the_place_of_its_nearest_parent(document: Document):
    assert document.at(("a", "b", "c")).line == 4
    assert document.at(("a", "d")).line == 2
    assert document.at(("z",)) == Place("f.yaml")


def test_get(document: Document):
    assert document.get(("a", "b", "c")) == 1
    assert document.get(("a", "b", "x"), 7) == 7
    assert document.get(("a", "d", "x")) is None


def test_with_value_leaves_the_old_one_alone(document: Document):
    changed = document.with_value(("a", "b", "c"), 5, Place(note="auto: x"))
    assert (changed.get(("a", "b", "c")), document.get(("a", "b", "c"))) == (5, 1)
    assert changed.at(("a", "b", "c")).source() == "auto: x"
    assert document.with_value(("n", "m"), 1, Place()).get(("n", "m")) == 1
    assert document.with_value(("a", "d", "x"), 1, Place()).get(("a", "d")) == {"x": 1}


def test_below_names_faults_by_the_whole_path(document: Document):
    inner = document.below(("a", "b"))
    assert inner.value == {"c": 1}
    assert inner.at(("c",)).where("c") == "f.yaml:4 a.b.c"
    assert document.below(("a",), "other").at(("b",)).where("b") == "f.yaml:3 other.b"
    assert document.below(("nothing",)).value == {}


def test_of_copies():
    mine = {"a": {"b": 1}}
    Document.of(mine).value["a"]["b"] = 2
    assert mine["a"]["b"] == 1


@pytest.mark.parametrize(
    ("place", "where", "source"),
    [
        (Place(), "k", "given"),
        (Place("f.json", 3), "f.json:3 k", "f.json:3"),
        (Place("f.json"), "f.json k", "f.json"),
        (
            Place("c.yaml", 3, "hyperparameters.ds_config"),
            "c.yaml:3 hyperparameters.ds_config.k",
            "c.yaml:3 hyperparameters.ds_config",
        ),
        (Place("f.json", 3, note="auto: lr"), "f.json:3 k", "auto: lr (f.json:3)"),
        (Place("f.json", 3).noted("filled", nowhere=True), "k", "filled"),
        (Place("f.json", 3).noted("filled"), "f.json:3 k", "filled (f.json:3)"),
    ],
)
def test_places_in_words(place: Place, where: str, source: str):
    assert place.where("k") == where
    assert place.source() == source


def test_twice():
    assert (
        str(twice("f.json", ("a", "b"), 2, 5))
        == "f.json:5 a.b: the key stands twice: got it on line 2 and line 5. Remove one of them."
    )
