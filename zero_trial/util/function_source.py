"""Read the source of a function: the names in the dicts that it returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Unknown(Exception):
    """The source does not say: the dict comes from elsewhere, or its keys do."""


def returned_names(function: ast.AST) -> frozenset[str] | None:
    """Return every name that a dict returned by ``function`` can hold; None where its source does
    not name all of them, or it is no function.

    What is understood: dict displays and ``dict(name=...)``, joined by ``|`` or chosen by ``if``,
    and local names that hold nothing else and get more entries only by constant keys. A name that
    is in the answer may still be missing in a call; one that is not in it is never there.
    """
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
