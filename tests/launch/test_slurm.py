"""SLURM's host lists written out."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a", ["a"]),
        ("a,b.example", ["a", "b.example"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists(text: str, hosts: list[str]):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[x]", "a[[1]]", "a,,b", "a[1-999999999]", "a[0-9999]b[0-9999]"]
)
def test_not_lists(text: str):
    with pytest.raises(ConfigError, match="not a list of hosts"):
        expand_hosts(text)
