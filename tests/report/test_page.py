"""HTML: escaping and the frame of a page."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.reading import read
from zero_trial.report import page
from zero_trial.report.page import Html, PageSection, breakable, el, join, json_data
from zero_trial.report.report_data import Status, Tone


def test_text_is_escaped_and_markup_is_not() -> None:
    assert el("p", "a < b & c", el("b", "x")) == "<p>a &lt; b &amp; c<b>x</b></p>"


def test_attributes() -> None:
    made = el("td", class_="num", data_label='"quoted" <b>', hidden=True, title=None, open=False)
    assert made == '<td class="num" data-label="&quot;quoted&quot; &lt;b&gt;" hidden></td>'
    assert el("wbr") == "<wbr>"


def test_a_name_is_broken_between_its_words() -> None:
    assert breakable("zero.max_<b>") == "zero.<wbr>max_<wbr>&lt;b&gt;<wbr>"
    assert breakable("..") == ".<wbr>.<wbr>" and breakable("") == ""


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


HEAD = page.heading("title", Status("done", Tone.GOOD), "")


def test_sections_without_content_are_left_out_and_three_make_a_navigation() -> None:
    sections = [
        PageSection("a", "A", "1"),
        PageSection("b", "B", None),
        PageSection("c", "C", [el("p", "x")]),
        PageSection("d", "D", "2"),
    ]
    found = read(page.document("t", HEAD, sections, "today"))
    assert found.faults == []
    assert [section.attributes["id"] for section in found.of("section")] == ["a", "c", "d"]
    links = [element.attributes["href"] for element in found.of("a")]
    assert links == ["#a", "#c", "#d"]
    assert found.of("html")[0].attributes["lang"] == "en"
    assert "on today" in found.text


def test_two_sections_need_none() -> None:
    assert read(page.document("t", HEAD, [PageSection("a", "A", "1"), PageSection("c", "C", "2")], "")).of("nav") == []


def test_a_state_is_a_word_and_a_form() -> None:
    assert page.state(Status("failed", Tone.BAD)) == '<span class="state bad">failed</span>'


def test_figures_and_facts() -> None:
    found = read(page.figures([("loss", "1.9", "from 5"), ("steps", "7", "")]))
    assert [e.text for e in found.of("dd")] == ["1.9", "7"]
    assert found.of("small")[0].text == "from 5"
    assert page.facts([]) is None


def test_style_and_script_cannot_end_their_elements() -> None:
    html = page.document("t", HEAD, [], "")
    assert html.count("</style>") == html.count("</script>") == 1
