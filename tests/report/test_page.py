"""The page around a report."""

from __future__ import annotations

from tests.report.reading import read
from zero_trial.report import page
from zero_trial.report.data import Status, Tone
from zero_trial.report.page import el

HEAD = page.heading("title", Status("done", Tone.GOOD), "")


def test_sections_without_content_are_left_out_and_three_make_a_navigation() -> None:
    sections = [("a", "A", "1"), ("b", "B", None), ("c", "C", [el("p", "x")]), ("d", "D", "2")]
    found = read(page.document("t", HEAD, sections, "today"))
    assert found.faults == []
    assert [section.attributes["id"] for section in found.of("section")] == ["a", "c", "d"]
    links = [element.attributes["href"] for element in found.of("a")]
    assert links == ["#a", "#c", "#d"]
    assert found.of("html")[0].attributes["lang"] == "en"
    assert "on today" in found.text


def test_two_sections_need_none() -> None:
    assert read(page.document("t", HEAD, [("a", "A", "1"), ("c", "C", "2")], "")).of("nav") == []


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
