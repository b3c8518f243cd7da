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

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def reported_metrics(method: Callable[..., Any]) -> frozenset[str] | None:
    """Return every name that a dict returned by ``method`` can hold; None where the source does
    not name all of them.

    What is understood: dict displays and ``dict(name=...)``, joined by ``|`` or chosen by ``if``. A
    name that is in the answer may still be missing in a call; one that is not in it is never there.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):
        return None
    return _returned_names(tree.body[0]) if tree.body else None


def _returned_names(function: ast.AST) -> frozenset[str] | None:
    # torch's decorators (torch.no_grad() ...) leave the returned dict as it is
    if not isinstance(function, _Function) or not all(
        ast.unparse(item).startswith("torch.") for item in function.decorator_list
    ):
        return None
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return None
    found = [_names(node.value) for node in own if isinstance(node, ast.Return) and node.value is not None]
    known = [names for names in found if names is not None]
    return frozenset().union(*known) if found and len(known) == len(found) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those of functions and classes inside."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _names(value: ast.expr) -> frozenset[str] | None:
    """Return the keys of a dict; None where the source does not say them."""
    match value:
        case ast.Dict(keys=keys):
            names: list[object] = [key.value if isinstance(key, ast.Constant) else None for key in keys]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            names = [keyword.arg for keyword in keywords]
        case ast.IfExp(body=left, orelse=right) | ast.BinOp(left=left, op=ast.BitOr(), right=right):
            first, second = _names(left), _names(right)
            return None if first is None or second is None else first | second
        case _:
            return None
    texts = [name for name in names if isinstance(name, str)]
    return frozenset(texts) if len(texts) == len(names) else None


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
