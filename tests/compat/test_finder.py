"""The finder: a package made of a table, with refusals and nearest names."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator

import pytest

from zero_trial.compat.finder import Refused, StandIn, StandInFinder, Table, distribution_of, install

TABLE: Table = {
    "invented": {"dumps": "json:dumps", "codec": "json.decoder", "Grown": Refused("it has shrunk; use dumps")},
    "invented.deep.inner": {"Decoder": "json:JSONDecoder", "strict": "json:JSONDecoder.decode"},
    "invented.gone": Refused("nothing of it is here; use invented.deep"),
}


@pytest.fixture
def finder() -> Iterator[StandInFinder]:
    before = list(sys.meta_path)
    made = install(StandIn("invented", "3.1", TABLE))
    yield made
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "invented"]:
        del sys.modules[name]


def test_names_are_resolved_when_they_are_asked_for(finder: StandInFinder):
    package = importlib.import_module("invented")
    assert package.dumps is json.dumps
    assert package.codec is json.decoder
    assert package.deep.inner.Decoder is json.JSONDecoder
    assert importlib.import_module("invented.deep.inner").strict is json.JSONDecoder.decode
    assert {"dumps", "codec", "deep"} <= set(dir(package)) and "Grown" not in dir(package)
    names: dict[str, object] = {}
    exec("from invented import *", names)
    assert names["dumps"] is json.dumps and "Grown" not in names


def test_a_refused_name_says_why_in_every_form(finder: StandInFinder):
    package = importlib.import_module("invented")
    with pytest.raises(AttributeError, match="shrunk"):
        package.Grown  # noqa: B018
    assert not hasattr(package, "Grown")
    for statement in (
        *("from invented import Grown", "import invented.Grown", "import invented.gone", "from invented import gone"),
        *("from invented.gone import X", "from invented.gone.deeper import X", "import invented.gone.deeper"),
    ):
        with pytest.raises(ImportError, match=r"invented\.deep|shrunk") as refusal:
            exec(statement, {})
        assert not isinstance(refusal.value, ModuleNotFoundError)
    with pytest.raises(AttributeError, match=r"use invented\.deep"):
        package.gone  # noqa: B018


def test_find_spec_knows_what_can_be_imported(finder: StandInFinder):
    for name in ("invented", "invented.deep", "invented.deep.inner"):
        assert importlib.util.find_spec(name) is not None
    for name in ("invented.gone", "invented.nonsense", "invented.deep.nonsense", "invented.dumps"):
        assert importlib.util.find_spec(name) is None


@pytest.mark.parametrize(
    ("module", "name", "nearest"),
    [
        ("invented", "dump", "invented.dumps"),
        ("invented", "depp", "invented.deep"),
        ("invented.deep", "Decoder", "invented.deep.inner.Decoder"),
        ("invented.deeep.iner", "Decodr", "invented.deep.inner.Decoder"),
    ],
)
def test_an_unlisted_name_answers_the_nearest(finder: StandInFinder, module: str, name: str, nearest: str):
    with pytest.raises(ImportError) as refusal:
        exec(f"from {module} import {name}", {})
    if not module.startswith("invented.deee"):  # there the module itself is what is not found
        assert f"Did you mean {nearest}?" in str(refusal.value)
    assert f"Did you mean {nearest}?" in finder.stand_in.refusal(module, name)
    assert "Did you mean" not in finder.stand_in.refusal("invented", "zzzzzz")


def test_the_distribution_is_known_on_this_pythons_path_alone(finder: StandInFinder, tmp_path):
    assert importlib.metadata.version("invented") == "3.1"
    assert list(importlib.metadata.distributions(name="invented", path=[str(tmp_path)])) == []
    assert "invented" in importlib.metadata.packages_distributions()
    assert distribution_of("invented", "3.1").read_text("RECORD") is None


def test_installed_twice_is_installed_once(finder: StandInFinder):
    assert install(StandIn("invented", "3.1", TABLE)) is finder
    replacing = install(StandIn("invented", "3.1", TABLE, replace=True))
    assert [f for f in sys.meta_path if isinstance(f, StandInFinder) and f.stand_in.top == "invented"] == [replacing]
    assert install(StandIn("invented", "3.1", TABLE)) is replacing
