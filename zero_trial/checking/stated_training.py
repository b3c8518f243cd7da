"""What the source of a trial's training says that will not do what it looks like: calls of plain torch that an engine replaces. Runs nothing."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Remark:
    """``where`` is file and line; ``what`` is wrong, ``fix`` is what to write instead."""

    where: str
    what: str
    fix: str


_CLIP = ("does not reach gradients that an engine holds", "Set gradient_clipping in ds_config.")
_CALLS = {
    "loss.backward": ("leaves out the accumulation and the loss scale of an engine", "Call engine.backward(loss)."),
    "clip_grad_norm_": _CLIP,
    "clip_grad_value_": _CLIP,
    "engine.optimizer.step": ("trains nothing: the engine updates the parameters", "Call engine.step()."),
    "engine.optimizer.zero_grad": (
        "forgets nothing: the engine holds the gradients",
        "Leave it out; engine.step() does.",
    ),
}
"""How a call's name ends -> why it is in vain, and what to write."""


def stated_training(method: Callable[..., Any]) -> list[Remark]:
    """Remarks on the source of ``train_batch``; none where it cannot be read, or does its work elsewhere."""
    try:
        plain = inspect.unwrap(method)
        file = Path(inspect.getsourcefile(plain) or "").name
        lines, first = inspect.getsourcelines(plain)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    remarks = []
    for call, name in _named_calls(tree):
        for ending, (what, fix) in _CALLS.items():
            if f".{name}".endswith((f".{ending}", f"_{ending}")):
                remarks.append(Remark(f"{file}:{first + call.lineno - 1}", f"{name} {what}", fix))
    return remarks


def _named_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Every call of a dotted name, in the order of lines."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = _dotted(call.func)
        if name:
            yield call, name


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
