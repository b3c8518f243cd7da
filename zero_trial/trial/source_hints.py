"""Read a trial's source: metric names that a method returns, and plain torch calls that an engine
replaces.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.util.function_source import returned_names


def reported_metrics(method: Callable[..., Any]) -> frozenset[str] | None:
    """Return every name that a dict returned by ``method`` can hold, as ``returned_names`` does;
    None where the source does not name all of them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):
        return None
    return returned_names(tree.body[0]) if tree.body else None


@dataclass(frozen=True)
class SourceIssue:
    """A call of plain torch that an engine replaces: file and line, what is wrong, what to write
    instead.
    """

    where: str
    what: str
    fix: str


_CLIP = (
    "is an error where gradients are sharded (ZeRO 2 and 3), and clips once more where gradient_clipping does",
    "Set gradient_clipping in ds_config.",
)

_CALLS = {
    "clip_grad_norm_": _CLIP,
    "clip_grad_value_": _CLIP,
    "engine.optimizer.step": ("trains nothing: the engine updates the parameters", "Call engine.step()."),
    "engine.optimizer.zero_grad": (
        "drops nothing between micro-batches: the engine holds the gradients",
        "Leave it out; engine.step() does.",
    ),
}
"""How a call's name ends -> what is wrong with it, and what to write."""


def training_issues(method: Callable[..., Any]) -> list[SourceIssue]:
    """Return issues in the source of ``train_batch``; none where it cannot be read, or calls other
    code.
    """
    try:
        plain = inspect.unwrap(method)
        file = Path(inspect.getsourcefile(plain) or "").name
        lines, first = inspect.getsourcelines(plain)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    issues = []
    for call, name in _named_calls(tree):
        for ending, (what, fix) in _CALLS.items():
            if f".{name}".endswith((f".{ending}", f"_{ending}")):
                issues.append(SourceIssue(f"{file}:{first + call.lineno - 1}", f"{name} {what}", fix))
    return issues


def _named_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call of a dotted name, in the order of lines."""
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
