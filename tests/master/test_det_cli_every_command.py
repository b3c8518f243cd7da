"""Every command that Determined's ``det`` has, once: each does its work, or says in one line why
not, and fails."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.master.det import Det, running

declarative = pytest.importorskip("determined.cli._declarative_argparse")

# What is not tried: it asks at a terminal, opens programs, waits for the end, or never asks the
# master.
SKIPPED = (
    "deploy",
    "user login",
    "user create",
    "user change-password",
    "dev curl",
    "dev bindings",
    "token login",
    "experiment wait",
)
# What would end the experiment that the others look at comes last.
LAST = ("experiment cancel", "experiment kill", "experiment delete", "trial kill", "user logout")
# What this master does; everything else must say that it does not, or that an argument made no
# sense.
WORKS = """
experiment list/config/describe/move/logs/download-model-def/list-trials/list-checkpoints/create/activate/pause/cancel/kill/download
experiment label add/label remove/set description/set name/set gc-policy/set max-slots/set weight/set priority
master config show/info/logs
agent list
slot list/enable/disable
job list
model list/create/move
template list/set/set-value config/describe/remove
task list
trial describe/logs/kill/support-bundle
user list/logout/whoami
workspace list/list-pools/create/list-projects/describe
project list/list-experiments/describe
auth login/list-providers
dev auth-token
"""
WORKING = {"version", "preview-search"} | {
    f"{noun} {verb}"
    for noun, _, verbs in (line.partition(" ") for line in WORKS.strip().splitlines())
    for verb in verbs.split("/")
}
VALUES = {
    "experiment_id": "1",
    "experiment_ids": "1",
    "trial_id": "1",
    "slot_id": "3",
    "max_slots": "2",
    "workspace_name": "Uncategorized",
    "project_name": "Uncategorized",
}
# These end in a trace of the client's own, before anything is asked, for want of sensible
# arguments.
OF_THE_CLIENT = {"job update-batch", "master cluster-message set"}
NO_SUCH_ID = "6f1c8d2e-0000-4000-8000-0123456789ab"


def commands(nodes: Sequence[Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that lead to it."""
    for node in nodes:
        if not isinstance(node, declarative.Cmd):
            continue
        words = (*before, node.name.split()[0].replace("|", ""))
        if any(isinstance(each, declarative.Cmd) for each in node.subs or ()):
            yield from commands(node.subs, words)
        else:
            yield words, node


def arguments(nodes: Sequence[Any], config: Path, values: Mapping[str, str]) -> list[str]:
    """A value for every argument that must be there."""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, declarative.Arg):
            name = node.args[0]
            needed = (
                node.kwargs.get("required")
                if name.startswith("-")
                else node.kwargs.get("nargs") not in ("?", "*", argparse.REMAINDER)
            )
            if needed:
                found += [max(node.args, key=len)] if name.startswith("-") else []
                found.append(values.get(name) or value(node.kwargs, config))
            elif "--yes" in node.args:
                found.append("--yes")
    return found


def value(kwargs: dict[str, Any], config: Path) -> str:
    if kwargs.get("choices"):
        return str(next(iter(kwargs["choices"])))
    if isinstance(kwargs.get("type"), argparse.FileType):
        return str(config)
    return "1" if kwargs.get("type") in (int, float) else NO_SUCH_ID


@pytest.fixture(scope="module")
def det(tmp_path_factory: pytest.TempPathFactory, master_options: tuple[str, ...]) -> Iterator[Det]:
    with running(tmp_path_factory.mktemp("every"), *master_options) as made:
        yield made


def test_every_command_works_or_says_why_not(det: Det) -> None:
    from determined.cli import cli

    config = det.write(entrypoint="true")
    det.create(entrypoint="sleep 1000")
    found = [(" ".join(words), words, node) for words, node in commands(cli.all_args_description)]
    found = [each for each in found if not each[0].startswith(SKIPPED)]
    found.sort(key=lambda each: each[0].startswith(LAST))
    values = {**VALUES, "agent_id": det.json("slot", "list")[-1]["agent_id"]}
    worked, faults = set(), []
    for name, words, node in found:
        result = det.run(*words, *arguments(node.subs or (), config, values))
        last = result.err.strip().splitlines()[-1:] or [""]
        if result.code == 0:
            worked |= (
                {name} if "Skipping: " not in result.out else set()
            )  # what the client says, and ends well, when the master refuses
        elif "Traceback" in result.err or not last[0] or "not supported by the embedded master" in result.text:
            faults.append((name, result.code, result.err))
    assert {name for name, _, _ in faults} == OF_THE_CLIENT, faults
    assert len(found) > 130
    assert (worked - WORKING, WORKING - worked) == (set(), set())
