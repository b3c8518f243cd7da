"""Hostfiles and their filters, as tables."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import choose, first_hosts, parse_hostfile

TWO = {"a": [0, 1, 2, 3], "b": [0, 1]}


def test_a_hostfile():
    assert parse_hostfile("# ours\na slots=4\n\nb  slots = 2  # small\n") == TWO


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb\n", "hostfile:2: not a host line: got 'b', expected host slots=N"),
        ("a slots=x", "hostfile:1: not a host line"),
        ("a slots=1\na slots=2", "hostfile:2: the host is named twice: got a"),
        ("a slots=0", "hostfile:1: a host needs at least one slot"),
        ("# nothing\n", "hostfile: the hostfile names no host"),
    ],
)
def test_bad_hostfiles(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", TWO),
        ("b", "", {"b": [0, 1]}),
        ("b@a:0,2", "", {"a": [0, 2], "b": [0, 1]}),  # in the order of the hostfile
        ("a:3,1,1", "", {"a": [1, 3]}),
        ("", "a", {"b": [0, 1]}),
        ("", "a:0@b:1", {"a": [1, 2, 3], "b": [0]}),
        ("", "b:0,1", {"a": [0, 1, 2, 3]}),
    ],
)
def test_filters(include: str, exclude: str, left: dict[str, list[int]]):
    assert choose(TWO, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "exclude each other"),
        ("c", "", "no such host in the hostfile: got 'c', expected a or b"),
        ("b:2", "", "no such slot on this host: got b:2 (slot 2), expected 0 to 1"),
        ("a:x", "", "not a list of slots"),
        ("a:", "", "not a list of slots"),
        ("a@a:1", "", "named twice"),
        ("", "a@b", "nothing is left"),
    ],
)
def test_bad_filters(include: str, exclude: str, message: str):
    with pytest.raises(ConfigError) as caught:
        choose(TWO, include, exclude)
    assert message in str(caught.value)


def test_first_hosts():
    assert first_hosts(TWO, 1, None) == {"a": [0, 1, 2, 3]}
    assert first_hosts(TWO, None, 2) == {"a": [0, 1], "b": [0, 1]}
    with pytest.raises(ConfigError, match="not so many hosts"):
        first_hosts(TWO, 3, None)
    with pytest.raises(ConfigError, match="b has not so many slots"):
        first_hosts(TWO, None, 3)
