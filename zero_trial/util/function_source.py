"""Read the source of a function: the names in the dicts that it returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def returned_names(function: ast.AST) -> frozenset[str] | None:
    """Return every name that a dict returned by ``function`` can hold; None where its source does
    not name all of them, or it is no function.

    What is understood: dict displays and ``dict(name=...)``, joined by ``|`` or chosen by ``if``. A
    name that is in the answer may still be missing in a call; one that is not in it is never there.
    """
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
