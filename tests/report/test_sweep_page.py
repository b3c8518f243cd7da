"""The page of a sweep: what is on it, hostile names, and what a browser makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from tests.report.browser import ask, needs_browser, screenshot
from tests.report.reading import read
from tests.report.samples import sweep_report
from tests.report.test_run_page import HOSTILE
from zero_trial.report.report_data import (
    Axis,
    BestConfig,
    BracketHistory,
    RungDecision,
    RungOutcome,
    Series,
    Status,
    SweepReport,
    Tone,
)
from zero_trial.report.sweep_page import render_sweep


def hostile_sweep() -> SweepReport:
    report = sweep_report(4)
    trials = tuple(
        replace(
            trial,
            id=f"{HOSTILE}{number}",
            status=Status(HOSTILE, Tone.BAD),
            point={HOSTILE: HOSTILE},
            curve=Series(HOSTILE, trial.curve.steps, trial.curve.values),
            why=HOSTILE,
        )
        for number, trial in enumerate(report.trials)
    )
    decision = RungDecision(f"{HOSTILE}0", RungOutcome.STOPPED, 1, 0, 5, 1.0, HOSTILE)
    return replace(
        report,
        title=HOSTILE,
        metric=HOSTILE,
        unit=HOSTILE,
        subtitle=HOSTILE,
        searcher=HOSTILE,
        throughput_unit=HOSTILE,
        trials=trials,
        axes=(Axis(HOSTILE, choices=(HOSTILE,)),),
        ladders=(BracketHistory(1, (5,), (decision,)),),
        pruned=((HOSTILE, 1),),
        facts=((HOSTILE, HOSTILE),),
        best=BestConfig(f"{HOSTILE}0", 1.0, HOSTILE, HOSTILE, HOSTILE),
    )


def test_the_page_holds_what_the_report_says() -> None:
    report = sweep_report()
    page = read(render_sweep(report))
    assert page.faults == []
    assert [element.text for element in page.of("h2")] == [
        "Best configuration",
        "Learning curves",
        "Search space",
        "Decisions of the search",
        "Trials",
    ]
    for expected in (
        "12 stopped early, 4 completed",
        "44 % of training every trial to its end",
        "train_batch_size: 6 is not",
        "19.1 MiB",
    ):
        assert expected in page.text, expected
    rows = [e for e in page.of("tr") if e.attributes.get("data-said")]
    assert len(rows) == 16, "pruned points are not trials"
    assert rows[0].attributes["data-trial"] == report.ranked()[0].id


def test_the_best_configuration_can_be_saved() -> None:
    link = next(e for e in read(render_sweep(sweep_report())).of("a") if e.attributes.get("download"))
    assert link.attributes["download"] == "best.yaml"
    assert unquote((link.attributes["href"] or "").split(",", 1)[1]) == "name: best\n"


def test_a_sweep_that_has_just_begun() -> None:
    report = SweepReport("new", Status("queued", Tone.BUSY), "grid", "loss", True, ())
    page = read(render_sweep(report))
    assert page.faults == []
    assert "no trial was measured" in page.text


def test_a_curve_far_off_does_not_press_the_others_flat() -> None:
    report = sweep_report()
    wild = replace(report.trials[0], curve=Series("validation_loss", (15.0, 60.0), (1e6, 1e7)), best=1e6)
    page = read(render_sweep(replace(report, trials=(wild, *report.trials[1:]))))
    assert "2 values far off the others are drawn at the edge." in page.text
    assert max(float(e.text.replace("k", "e3")) for e in page.having("y")) < 20


def test_hostile_names_stay_text() -> None:
    html = render_sweep(hostile_sweep())
    page = read(html)
    assert page.faults == []
    assert page.of("img") == []
    assert html.count("<script>") == 1
    assert not any(name.startswith("on") for element in page.elements for name in element.attributes)


@needs_browser
def test_in_a_browser_it_fits_a_phone_and_a_desktop_and_can_be_used(tmp_path: Path) -> None:
    report = sweep_report()
    script = """
      const widths = {};
      for (const width of [390, 1280]) {
        frame.width = width;
        widths[width] = { scroll: page.documentElement.scrollWidth, wide: outside() };
      }
      const section = (id) => page.getElementById(id);
      const row = section("trials").querySelector("tbody tr");
      row.dispatchEvent(new view.PointerEvent("pointerover", { bubbles: true }));
      const lit = all(".lit").map((e) => e.tagName.toLowerCase()).sort().join(" ");
      const named = all(".lit-name")[0].textContent;
      row.dispatchEvent(new view.PointerEvent("pointerout", { bubbles: true }));
      const after = all(".lit").length;
      const plot = section("curves").querySelector(".plot"), box = plot.getBoundingClientRect();
      const best = plot.querySelector("path.line.best"), ctm = plot.querySelector("svg").getScreenCTM();
      const [x, y] = best.getAttribute("d").slice(1).split("L")[1].split(" ").map(Number);
      plot.dispatchEvent(new view.PointerEvent("pointermove", { clientX: x * ctm.a + ctm.e - 20, clientY: y * ctm.d + ctm.f, bubbles: true }));
      const pointed = all("tr.lit").map((e) => e.dataset.trial);
      const handle = all(".handle[data-axis='3'][data-end='low']")[0];
      for (let times = 0; times < 10; times += 1) handle.dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
      const kept = all(".heard")[0].textContent, out = all("#trials tr.out").length;
      all(".clear")[0].click();
      const cleared = all("tr.out").length;
      const first = () => section("trials").querySelector("tbody tr").dataset.trial;
      const sort = [...section("trials").querySelectorAll("thead button")].find((e) => e.textContent === "samples/s");
      sort.click(); const slowest = first(); sort.click(); const fastest = first();
      return { widths, lit, named, after, pointed, kept, out, cleared, slowest, fastest,
               loads: view.performance.getEntriesByType("resource").length };
    """
    found = ask(tmp_path, render_sweep(report), script)
    assert found["widths"]["390"] == {"scroll": 390, "wide": []}
    assert found["widths"]["1280"]["wide"] == []
    best = report.ranked()[0].id
    assert "path" in found["lit"] and "tr" in found["lit"] and "button" in found["lit"]
    assert found["named"].startswith(f"trial {best}: best validation_loss ")
    assert found["after"] == 0
    assert best in found["pointed"]
    assert 0 < found["out"] < 16
    assert found["kept"] == f"{16 - found['out']} of 16 trials"
    assert found["cleared"] == 0
    assert (found["slowest"], found["fastest"]) == ("1", "16")
    assert found["loads"] == 0


@needs_browser
def test_nothing_hostile_runs(tmp_path: Path) -> None:
    found = ask(
        tmp_path, render_sweep(hostile_sweep()), "return [page.body.dataset.owned || null, page.images.length];"
    )
    assert found == [None, 0]


@needs_browser
def test_pictures_of_it(tmp_path: Path) -> None:
    """That something is drawn in the colours of the style sheet; whether it is beautiful is for
    people to say."""
    from PIL import Image

    with Image.open(screenshot(tmp_path, render_sweep(sweep_report()))) as shown:
        for part in ((0, 0, 390, 1500), (390, 0, 1670, 1500)):
            colours = {colour for _, colour in shown.convert("RGB").crop(part).getcolors(2**24) or ()}
            assert len(colours) > 50
            assert {(11, 98, 168), (251, 251, 249)} <= colours
