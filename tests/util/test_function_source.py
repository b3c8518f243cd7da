"""The names in the dicts that a function returns, by its source; more in
tests/trial/test_source_metrics.py."""

from __future__ import annotations

import ast

import pytest

from zero_trial.util.function_source import returned_names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(): return {'a': 1, 'b': 2}", {"a", "b"}),
        ("def f(x):\n if x: return {'a': 1}\n return dict(b=1) | {'c': 2}", {"a", "b", "c"}),
        ("async def f(): return {'a': 1}", {"a"}),
        ("def f(x): return x", None),
        ("def f(): pass", None),
        ("def f(): yield {'a': 1}", None),
        ("@cached\ndef f(): return {'a': 1}", None),
        ("f = lambda: {'a': 1}", None),
    ],
)
def test_what_the_source_says(source: str, names: set[str] | None) -> None:
    assert returned_names(ast.parse(source).body[0]) == names
