"""HTML that is escaped by construction."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.reading import read
from zero_trial.report.page import Html, el, join, json_data


def test_text_is_escaped_and_markup_is_not() -> None:
    assert el("p", "a < b & c", el("b", "x")) == "<p>a &lt; b &amp; c<b>x</b></p>"


def test_attributes() -> None:
    made = el("td", class_="num", data_label='"quoted" <b>', hidden=True, title=None, open=False)
    assert made == '<td class="num" data-label="&quot;quoted&quot; &lt;b&gt;" hidden></td>'
    assert el("br") == "<br>"


def test_children_are_flattened_and_nothing_is_left_out_but_nothing() -> None:
    assert join(["a", None, [1, (Html("<i></i>"), False)], 0]) == "a1<i></i>0"


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--<script>", "&lt;", "\u2028"])
def test_json_cannot_leave_its_script_element(text: str) -> None:
    made = json_data({"name": text})
    body = made.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(body)
    assert json.loads(body) == {"name": text}


@given(st.text())
def test_any_text_comes_back_as_text(text: str) -> None:
    page = read(el("p", text, title=text))
    assert page.faults == []
    assert [element.tag for element in page.elements] == ["p"]


def test_control_characters_and_half_pairs_are_shown() -> None:
    assert join("a\x00\x1b[31mb\nc\ud800") == "a\u2400\u241b[31mb\nc?"
