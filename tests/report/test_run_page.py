"""The page of a run: everything of the report is on it, nothing is loaded, hostile names stay text,
and a browser shows it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from tests.report.browser import ask, needs_browser, screenshot
from tests.report.reading import read
from tests.report.samples import run_report
from zero_trial.report.report_data import Memory, MetricChange, RunReport, Series, Setting, Status, Tone
from zero_trial.report.run_page import render_run

HOSTILE = "</title></script><script>document.body.dataset.owned=1</script><img src=x onerror=alert(1)>\"'`"


def hostile_run() -> RunReport:
    series = Series(HOSTILE, (0.0, 1.0), (1.0, 2.0))
    return replace(
        run_report(),
        title=HOSTILE,
        subtitle=HOSTILE,
        message=HOSTILE,
        status=Status(HOSTILE, Tone.BAD),
        changes=(MetricChange(HOSTILE, 1.0, 2.0, ((HOSTILE, 1.0),)),),
        facts=((HOSTILE, HOSTILE),),
        training=series,
        validation=(series,),
        progress=(series,),
        settings=(Setting(HOSTILE, HOSTILE, HOSTILE, HOSTILE, True),),
        warnings=(HOSTILE,),
        repeat=HOSTILE,
        lock=HOSTILE,
    )


def test_the_page_holds_what_the_report_says() -> None:
    page = read(render_run(run_report()))
    assert page.faults == []
    text = page.text
    for expected in (
        "quickstart",
        "completed",
        "first 8.1 · unigram 4.69 · xz 1.6",
        "hyperparameter global_batch_size",
        "ds_config.json:22",
        "false before DeepSpeed 0.19.8",
        "derived: 16 // 2 ranks // 1",
        "step-000700",
        "zero-trial run runs/0001/config.lock.yaml",
    ):
        assert expected in text, expected
    assert [element.text for element in page.of("h3")][:2] == ["loss", "val_bits_per_byte"]


def test_what_was_not_recorded_has_no_section() -> None:
    page = read(render_run(RunReport("bare", Status("not started", Tone.BUSY))))
    assert page.faults == []
    assert [element.attributes["id"] for element in page.of("section")] == ["summary"]


def test_a_failed_run_says_why() -> None:
    page = read(
        render_run(replace(run_report(), status=Status("failed", Tone.BAD), message="loss became nan\nTry lr / 2."))
    )
    assert page.having("fault")[0].text == "loss became nan\nTry lr / 2."


def test_hostile_names_stay_text() -> None:
    html = render_run(hostile_run())
    page = read(html)
    assert page.faults == []
    assert page.of("img") == []
    kinds = [element.attributes.get("type") for element in page.of("script")]
    assert kinds.count(None) == 1, "one script is code, and it is ours"
    assert html.count("<script>") == 1
    assert page.of("h1")[0].text == HOSTILE
    assert not any(name.startswith("on") for element in page.elements for name in element.attributes)


def test_the_page_loads_nothing() -> None:
    html = render_run(run_report())
    page = read(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    for element in page.elements:
        for name in ("src", "href", "action", "data"):
            target = element.attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), target
    (policy,) = [e for e in page.of("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert (policy.attributes["content"] or "").startswith("default-src 'none'")


def test_the_lock_can_be_saved() -> None:
    (link,) = read(render_run(run_report())).having("button")
    assert link.attributes["download"] == "config.lock.yaml"
    assert unquote((link.attributes["href"] or "").split(",", 1)[1]) == "name: quickstart\n"


def test_the_plan_alone_is_shown_too() -> None:
    assert "planned" in read(render_run(replace(run_report(), memory=Memory({"parameters": 5}, 5)))).text


@needs_browser
def test_in_a_browser_it_fits_a_phone_and_a_desktop_and_can_be_used(tmp_path: Path) -> None:
    html = render_run(run_report())
    script = """
      const widths = {};
      for (const width of [390, 1280]) {
        frame.width = width;
        const root = page.documentElement;
        widths[width] = { scroll: root.scrollWidth, wide: outside(), plot: Math.round(all(".plot")[0].getBoundingClientRect().width) };
      }
      const plot = all(".plot")[0], box = plot.getBoundingClientRect();
      plot.dispatchEvent(new view.PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true }));
      const tip = all(".tip")[0].textContent;
      plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: "Escape" }));
      const hidden = all(".tip").length;
      plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowRight" }));
      const first = all(".tip")[0].textContent;
      const before = all("[data-line='0']")[0].getAttribute("d");
      const slider = all(".smoothing")[0];
      slider.value = 0.9;
      slider.dispatchEvent(new view.Event("input"));
      const after = all("[data-line='0']")[0].getAttribute("d");
      return { widths, tip, hidden, first, smoothing: before !== after, loads: view.performance.getEntriesByType("resource").length };
    """
    found = ask(tmp_path, html, script)
    assert found["widths"]["390"]["scroll"] <= 390, found["widths"]
    assert found["widths"]["390"]["wide"] == []
    assert found["widths"]["1280"]["wide"] == []
    assert found["widths"]["1280"]["plot"] > 900
    assert found["tip"].startswith("step 350")
    assert "validation_loss2.2" in found["tip"]
    assert found["hidden"] == 0
    assert found["first"].startswith("step 0")
    assert found["smoothing"] is True
    assert found["loads"] == 0


@needs_browser
def test_nothing_hostile_runs(tmp_path: Path) -> None:
    found = ask(
        tmp_path, render_run(hostile_run()), "return [page.body.dataset.owned || null, page.images.length, page.title];"
    )
    assert found == [None, 0, f"{HOSTILE} · zero-trial"]


@needs_browser
def test_pictures_of_it(tmp_path: Path) -> None:
    """That something is drawn in the colours of the style sheet; whether it is beautiful is for
    people to say."""
    from PIL import Image

    with Image.open(screenshot(tmp_path, render_run(run_report()))) as shown:
        for part in ((0, 0, 390, 1500), (390, 0, 1670, 1500)):
            colours = {colour for _, colour in shown.convert("RGB").crop(part).getcolors(2**24) or ()}
            assert len(colours) > 50
            assert {(11, 98, 168), (251, 251, 249), (194, 87, 12)} <= colours
