"""A hostfile in DeepSpeed's grammar, ``host slots=N`` per line, and the filters that choose hosts and slots from it. Pure.

A filter is ``host1@host2:0,2``: whole hosts, or slots of a host. ``include`` keeps only what it names, ``exclude`` drops what it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zero_trial.errors import ConfigError

Slots = dict[str, list[int]]
"""Slot numbers by host, in the order of the hostfile."""

_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def parse_hostfile(text: str, name: str = "hostfile") -> Slots:
    """Hosts and their slots. ``#`` starts a comment. Raises ConfigError, with the line, for anything else and for a host named twice."""
    hosts: Slots = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        where = f"{name}:{number}"
        if found is None:
            raise ConfigError("not a host line", where=where, got=repr(line), expected="host slots=N")
        host, slots = found[1], int(found[2])
        if host in hosts:
            raise ConfigError(
                "the host is named twice", where=where, got=host, fix="Give it one line with all its slots."
            )
        if slots < 1:
            raise ConfigError(
                "a host needs at least one slot", where=where, got=slots, fix="Remove the line to leave it out."
            )
        hosts[host] = list(range(slots))
    if not hosts:
        raise ConfigError("the hostfile names no host", where=name, expected="lines of the form: host slots=N")
    return hosts


def choose(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """The hosts and slots that are left by one of the filters. Raises ConfigError when both are given, or one names what is not there."""
    if include and exclude:
        raise ConfigError("--include and --exclude exclude each other", fix="Give one of them.")
    if include:
        named = _parse_filter(include, "--include", hosts)
        return {host: named[host] for host in hosts if host in named}
    if exclude:
        dropped = _parse_filter(exclude, "--exclude", hosts)
        left = {host: [slot for slot in slots if slot not in dropped.get(host, ())] for host, slots in hosts.items()}
        left = {host: slots for host, slots in left.items() if slots}
        if not left:
            raise ConfigError("nothing is left to run on", where="--exclude", got=exclude)
        return left
    return {host: list(slots) for host, slots in hosts.items()}


def first_hosts(hosts: Mapping[str, list[int]], num_nodes: int | None, num_slots: int | None) -> Slots:
    """The first ``num_nodes`` hosts, and on each the first ``num_slots`` slots (None: all). Raises ConfigError when there are fewer."""
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise ConfigError(
            "there are not so many hosts", where="--num_nodes", got=num_nodes, expected=f"1 to {len(hosts)}"
        )
    chosen = dict(list(hosts.items())[:num_nodes])
    for host, slots in chosen.items():
        if num_slots is not None and not 1 <= num_slots <= len(slots):
            raise ConfigError(
                f"{host} has not so many slots", where="--num_gpus", got=num_slots, expected=f"1 to {len(slots)}"
            )
    return {host: slots[:num_slots] for host, slots in chosen.items()}


def _parse_filter(text: str, option: str, hosts: Mapping[str, list[int]]) -> Slots:
    """``a@b:0,2`` as slots by host, checked against the hosts that there are."""
    named: Slots = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise ConfigError("no such host in the hostfile", where=option, got=repr(host), expected=" or ".join(hosts))
        if host in named:
            raise ConfigError("the host is named twice", where=option, got=host)
        named[host] = _slots(numbers, hosts[host], part, option) if colon else list(hosts[host])
    return named


def _slots(numbers: str, present: list[int], part: str, option: str) -> list[int]:
    items = numbers.split(",")
    if not all(item.isdigit() for item in items):
        raise ConfigError("not a list of slots", where=option, got=repr(part), expected="host:0,1")
    slots = sorted({int(item) for item in items})
    missing = [slot for slot in slots if slot not in present]
    if missing:
        raise ConfigError(
            "no such slot on this host", where=option, got=f"{part} (slot {missing[0]})", expected=f"0 to {present[-1]}"
        )
    return slots
