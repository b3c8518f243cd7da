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


class _Unknown(Exception):
    """The source does not say: the dict comes from elsewhere, or its keys do."""


def reported_metrics(method: Callable[..., Any]) -> frozenset[str] | None:
    """Return every name that a dict returned by ``method`` can hold; None where the source does not
    name all of them.

    What is understood: dict displays and ``dict(name=...)``, joined by ``|`` or chosen by ``if``,
    and local names that hold nothing else and get more entries only by constant keys. A name that
    is in the answer may still be missing in a call; one that is not in it is never there.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, _Function) or not all(_is_plain(item) for item in function.decorator_list):
        return None
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return None
    try:
        returned = [node.value for node in own if isinstance(node, ast.Return) and node.value is not None]
        return frozenset().union(*(_names(value, function) for value in returned)) if returned else None
    except _Unknown:
        return None


def _is_plain(decorator: ast.expr) -> bool:
    """Return whether it is one of torch's (``torch.no_grad()`` ...), which leave the returned dict
    as it is."""
    return ast.unparse(decorator).startswith("torch.")


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those of functions and classes inside."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _names(value: ast.expr, function: _Function) -> frozenset[str]:
    if isinstance(value, ast.Dict):
        return frozenset(_constant(key) for key in value.keys)
    if isinstance(value, ast.IfExp):
        return _names(value.body, function) | _names(value.orelse, function)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _names(value.left, function) | _names(value.right, function)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict" and not value.args:
        return frozenset(_keyword(keyword) for keyword in value.keywords)
    if isinstance(value, ast.Name):
        return _names_of_local(value.id, function)
    raise _Unknown


def _constant(key: ast.expr | None) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise _Unknown


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise _Unknown
    return keyword.arg


def _names_of_local(name: str, function: _Function) -> frozenset[str]:
    """Return the names in a local variable, if every place that names it is understood."""
    found: frozenset[str] = frozenset()
    understood: set[int] = set()
    assigned = False
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and _is(node.value, name):
            understood.add(id(node.value))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if _is(target, name):
                    if len(targets) > 1 or any(_is(inner, name) for inner in ast.walk(node.value)):
                        raise _Unknown
                    found, assigned = found | _names(node.value, function), True
                    understood.add(id(target))
        elif isinstance(node, ast.Subscript) and _is(node.value, name):
            understood.add(id(node.value))
            if isinstance(node.ctx, ast.Store):
                found |= {_constant(node.slice)}
    if not assigned or any(_is(node, name) and id(node) not in understood for node in ast.walk(function)):
        raise _Unknown
    return found


def _is(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


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
