"""Memory as pictures: the parts of a plan beside what was measured, and small bars for tables."""

from __future__ import annotations

from collections.abc import Mapping

from zero_trial.report.data import Memory
from zero_trial.report.markup import Child, Html, el, join
from zero_trial.report.numbers import size

# Darkest first: what outlives a step, then what comes and goes.
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def memory_view(memory: Memory) -> Html | None:
    """Planned parts, the planned and the measured peak as bars of one scale, and a line on each; None if nothing is known."""
    if memory.planned is None and memory.measured is None and not memory.processes:
        return None
    widest = max(memory.planned or 0, memory.measured or 0, sum(_parts(memory).values()), 1)
    rows = []
    if memory.planned is not None:
        rows.append(
            _row("planned", _stack(_parts(memory) or {"peak": memory.planned}, memory.planned, widest), memory.planned)
        )
    if memory.measured is not None:
        rows.append(_row("measured", _stack({"measured": memory.measured}, memory.measured, widest), memory.measured))
    return join([rows, _key(_parts(memory)), _remarks(memory)])


def bar(value: float | None, widest: float, text: str) -> Child:
    """A number with a bar under it; the text alone where there is no number."""
    if value is None or widest <= 0:
        return text
    return [text, el("span", el("i", style=f"--w:{min(value / widest, 1):.4g}"), class_="bar", aria_hidden="true")]


def _parts(memory: Memory) -> Mapping[str, int]:
    return {name: memory.parts[name] for name in PARTS if memory.parts.get(name)}


def _stack(parts: Mapping[str, int], peak: int, widest: int) -> Html:
    """Parts that together pass the peak do not all live at once: they are drawn in proportion within it."""
    total = max(sum(parts.values()), peak)
    cells = [
        el("i", title=f"{name}: {size(value)}", style=f"--w:{value / total * peak / widest:.4g};--m:{_shade(name)}")
        for name, value in parts.items()
    ]
    return el("div", cells, class_="stack", aria_hidden="true")


def _shade(name: str) -> str:
    return f"{1.0 - 0.19 * PARTS.index(name):.2f}" if name in PARTS else "1"


def _row(name: str, stack: Html, value: int) -> Html:
    return el("div", el("span", name), stack, el("b", size(value)), class_="stack-row")


def _key(parts: Mapping[str, int]) -> Html | None:
    if not parts:
        return None
    items = [
        el("li", el("i", class_="swatch", style=f"--m:{_shade(name)}"), name, el("b", size(value)))
        for name, value in parts.items()
    ]
    return el("ul", items, class_="legend")


def _verdict(percent: float) -> str:
    if abs(percent) < 0.05:
        return "The plan, made before the first step, came true to a tenth of a percent."
    return f"The plan, made before the first step, is off by {percent:+.1f} %."


def _remarks(memory: Memory) -> Html:
    said = ["Bytes of live tensors on rank 0 at the peak of a step."] if memory.planned or memory.measured else []
    if memory.planned and memory.measured:
        said.append(_verdict(100 * (memory.planned / memory.measured - 1)))
    if memory.parts and memory.planned and sum(_parts(memory).values()) > memory.planned * 1.001:
        said.append(
            "The parts do not all live at the same moment, so they add up to more than the peak; they are drawn in proportion."
        )
    if memory.processes:
        kind = f" ({memory.processes_kind})" if memory.processes_kind else ""
        each = ", ".join(size(value) for value in memory.processes)
        said.append(f"Peak of each rank's process{kind}, libraries included: {each}.")
    if memory.limit_line:
        said.append(f"Limit: {memory.limit_line}.")
    return el("p", " ".join(said), class_="note", style="margin-top:.9rem")
