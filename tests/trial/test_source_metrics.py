"""What a method's source says of the metrics that it returns, and where it says nothing."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from zero_trial.trial.validation import reported_metrics

_NUMBERS = count()


def method(body: str, decorator: str = "") -> Callable[..., Any]:
    """``body`` as a method of a class, with a source that can be found."""
    text = (
        f"class Trial:\n    {decorator or 'x = 0'}\n    def evaluate(self, batch):\n{textwrap.indent(body, ' ' * 8)}\n"
    )
    name, made = f"<stated metrics {next(_NUMBERS)}>", dict[str, Any](torch=torch, wrapped=lambda function: function)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), made)
    found: Callable[..., Any] = made["Trial"].evaluate
    return found


def test_a_dict_is_what_it_says():
    assert reported_metrics(method('return {"loss": 1, "accuracy": batch}')) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return dict(loss=1, accuracy=2)", {"loss", "accuracy"}),
        ('if batch:\n    return {"a": 1}\nreturn {"b": 1} | dict(c=1)', {"a", "b", "c"}),
        ('return {"a": 1} if batch else {}', {"a"}),
        ("return {}", set()),
        ('def inner():\n    return 3\nf = lambda: 4\nreturn {"a": inner()}', {"a"}),
    ],
)
def test_what_is_understood(body: str, names: set[str]):
    assert reported_metrics(method(body)) == names


@pytest.mark.parametrize(
    "body",
    [
        "return batch",
        "return self.evaluate(batch)",
        'return {**batch, "a": 1}',
        "return {batch: 1}",
        "return dict(batch)",
        "return dict(**batch)",
        'm = {"a": 1}\nm.update(batch)\nreturn m',
        'if batch:\n    return {"a": 1}\nreturn batch',
        'yield {"a": 1}',
        "raise NotImplementedError",
    ],
)
def test_what_is_not_known(body: str):
    assert reported_metrics(method(body)) is None


def test_decorators():
    assert reported_metrics(method('return {"a": 1}', "@torch.no_grad()")) == {"a"}
    assert reported_metrics(method('return {"a": 1}', "@wrapped")) is None


def test_without_a_source():
    assert reported_metrics(len) is None
    made: dict[str, Any] = {}
    exec("def evaluate():\n    return {'a': 1}\n", made)
    assert reported_metrics(made["evaluate"]) is None
