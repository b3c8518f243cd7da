"""Slurm as the master's engine: sbatch starts a job, squeue reports its state, scancel ends it, and
scontrol lists machines (nodes) and pools (partitions).

A slot is a GPU of the node's GRES, or, on nodes without GPUs, a number of CPUs. Slurm's accounting
is not used. Separate functions build and parse all text.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.resources import EngineBusy, Node

_PREFIX = "zt-"  # of job names
_FORMAT = "%i|%T|%N|%r|%j"  # for squeue: id, state, nodes, reason, name
_SECONDS = 60.0  # timeout of a Slurm command

_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LD_LIBRARY_PATH"),
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"),
)
"""The variables that Slurm's commands and jobs get. All others may change what a command does:
SBATCH_JOB_NAME or SQUEUE_PARTITION from a shell, SLURM_* from the job in which a master runs.
"""

_GIVEN: dict[str, str] = {
    **dict.fromkeys(("partition", "p"), "Write resources.resource_pool."),
    **dict.fromkeys(("nodes", "N", "ntasks", "n"), "Write resources.slots_per_trial."),
    **dict.fromkeys(("gpus", "G", "gpus-per-node", "ntasks-per-node"), "Write resources.slots_per_trial."),
    **dict.fromkeys(("exclude", "x"), "Disable the node: det agent disable NAME."),
    **dict.fromkeys(("job-name", "J", "array", "a", "clusters", "M"), "Remove it: the master finds jobs by name."),
    **dict.fromkeys(("output", "o", "open-mode", "wait", "W", "wrap"), "Remove it."),
    **dict.fromkeys(("requeue", "no-requeue", "parsable", "test-only"), "Remove it."),
    **dict.fromkeys(("export", "export-file", "get-user-env"), "Write environment.environment_variables."),
}
"""Options of sbatch that only the master sets -> what a user writes instead."""

_FLAGS = "HIkOQsvhVu"  # sbatch's one-letter options without a value

_USABLE = frozenset(("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED"))
_HARMLESS = frozenset(
    ("CLOUD", "PLANNED", "COMPLETING", "POWERED_DOWN", "POWERING_UP", "DYNAMIC_NORM", "DYNAMIC_FUTURE")
)
_WAITING = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_ENDS = {
    "COMPLETED": JobEnd.DONE,
    "FAILED": JobEnd.FAILED,
    "CANCELLED": JobEnd.CANCELED,
    "REVOKED": JobEnd.CANCELED,
    "NODE_FAIL": JobEnd.NODE_LOST,
    "BOOT_FAIL": JobEnd.NODE_LOST,
    "PREEMPTED": JobEnd.PREEMPTED,
    "TIMEOUT": JobEnd.TIME_LIMIT,
    "DEADLINE": JobEnd.TIME_LIMIT,
    "OUT_OF_MEMORY": JobEnd.OUT_OF_MEMORY,
}
"""Slurm's state of a job -> why it has ended. In all other states, the job has not ended."""


def fields_of(line: str) -> dict[str, str]:
    """Parse a line of ``scontrol show --oneliner``: NAME=VALUE; values may contain blanks."""
    found = re.finditer(r"(?:^|\s)([A-Z][A-Za-z_:/]*)=(.*?)(?=\s+[A-Z][A-Za-z_:/]*=|\s*$)", line)
    return {match[1]: match[2].strip() for match in found}


def hosts(text: str) -> list[str]:
    """Expand a Slurm node list: ``n[01-03],login`` becomes n01, n02, n03, login."""
    if text in ("", "(null)", "None assigned"):
        return []
    found: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found += _expanded(item)
    return found


def _expanded(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for end in _expanded(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def gpus_in(gres: str) -> int:
    """Return the number of GPUs in a node's GRES: 4 for ``gpu:a100:4(S:0-1),shard:8``."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    counts = (item.split(":") for item in bare.split(",") if item.split(":")[0] == "gpu")
    return sum(int(parts[-1]) if parts[-1].isdigit() else 1 for parts in counts)


def is_usable(state: str) -> bool:
    """Return whether a node in a state such as ``IDLE+DRAIN`` or ``MIXED*`` can start jobs."""
    base, *flags = state.split("+")
    return base in _USABLE and _HARMLESS.issuperset(flags)


def nodes_in(text: str, *, cpus: int, gpus: bool) -> list[Node]:
    """Parse ``scontrol show node --oneliner``.

    A machine without GPUs is excluded from partitions that have GPUs, and omitted if it is in no
    other partition.

    Args:
        cpus: CPUs per CPU slot.
        gpus: whether to use GPUs.
    """
    found = []
    for line in text.splitlines():
        fields = fields_of(line)
        if "NodeName" not in fields:
            continue
        graphics, cores = (
            gpus_in(fields.get("Gres", "")) if gpus else 0,
            int(fields.get("CPUEfctv") or fields["CPUTot"]),
        )
        slots = graphics or cores // cpus
        partitions = tuple(name for name in fields.get("Partitions", "").split(",") if name)
        if slots and partitions:
            kind, up = "cuda" if graphics else "cpu", is_usable(fields["State"])
            address = fields.get("NodeAddr", fields["NodeName"])
            each = cpus
            if graphics:  # whole cores: Slurm allocates no less, and the last GPU would get none
                share, threads = cores // graphics, int(fields.get("ThreadsPerCore") or 1)
                each = max(1, share - share % threads)
            found.append(Node(fields["NodeName"], slots, 0, kind, partitions, up, address, cpus=each))
    graphic = {pool for node in found if node.kind == "cuda" for pool in node.pools}
    left = [
        node if node.kind == "cuda" else replace(node, pools=tuple(pool for pool in node.pools if pool not in graphic))
        for node in found
    ]
    return [node for node in left if node.pools]


def partitions_in(text: str) -> tuple[str, ...]:
    """Parse ``scontrol show partition --oneliner``; return the names, the default first."""
    found = [fields_of(line) for line in text.splitlines() if "PartitionName=" in line]
    found.sort(key=lambda fields: fields.get("Default") != "YES")
    return tuple(fields["PartitionName"] for fields in found)


def jobs_in(text: str) -> dict[str, tuple[int, JobStatus]]:
    """Parse squeue's list of our jobs; return id and status by allocation (from the job's name)."""
    found: dict[str, tuple[int, JobStatus]] = {}
    for line in text.splitlines():
        number, state, nodes, reason, name = line.split("|", 4)
        if name.startswith(_PREFIX):
            job = int(number.partition("_")[0]), status_of(state, nodes, reason)
            allocation = name.removeprefix(_PREFIX)
            found[allocation] = max(job, found.get(allocation, job), key=lambda one: one[0])
    return found


def status_of(state: str, nodes: str, reason: str) -> JobStatus:
    """Return a job's status from three columns of squeue."""
    why = "" if reason in ("None", "") else reason
    end = _ENDS.get(state)
    if end is not None:
        return JobStatus(tuple(hosts(nodes)), end, f"Slurm: {state}" + (f", {why}" if why else ""))
    if state in _WAITING:
        return JobStatus(why=f"Slurm has queued the job: {why or state}")
    return JobStatus(tuple(hosts(nodes)))


_BUSY = re.compile(
    r"contact slurm controller|communication|standby mode|Rate limit|MaxJobCount|SubmitJob|temporarily"
    r"|timed out|Zero Bytes were transmitted|Connection refused|authentication|munge|error writing script",
    re.IGNORECASE,
)
"""Slurm's error messages when it cannot accept a job now (slurm_errno.c), or no more jobs at a time
(QOSMaxSubmitJobPerUserLimit and similar, job_state_reason.c).
"""


def is_busy(complaint: str) -> bool:
    """Return whether Slurm rejected a command for a reason unrelated to the job."""
    return _BUSY.search(complaint) is not None


def arguments_of(section: Mapping[str, Any]) -> list[str]:
    """Return the words of ``slurm.sbatch_args``; one item may contain several: ``-A physics``.

    Raises ConfigError for an option that the master sets itself.
    """
    where = "slurm.sbatch_args"
    words: list[str] = []
    for item in section.get("sbatch_args") or ():
        try:
            words += shlex.split(str(item))
        except ValueError as error:
            raise ConfigError("cannot be split into words", where=where, got=f"{item} ({error})") from error
    for word in words:
        for name in _options_in(word):
            if name in _GIVEN:
                raise ConfigError("is an option that the master sets", where=where, got=word, fix=_GIVEN[name])
    return words


def _options_in(word: str) -> list[str]:
    """List the options that a command line word may stand for: sbatch accepts abbreviated long
    names, and several one-letter options in one word."""
    if word.startswith("--"):
        begin = word[2:].partition("=")[0]
        return [name for name in _GIVEN if len(name) > 1 and begin and name.startswith(begin)]
    if not word.startswith("-"):
        return []
    flags = len(word) - len(word[1:].lstrip(_FLAGS))
    return list(word[1 : flags + 1])


def script(job: ClusterJob) -> str:
    """Return the batch script of a job. The experiment's ``slurm.sbatch_args`` are appended.

    The batch step runs on the first node, and starts the trial on every node as a step. If a node's
    part ends without recording its exit, the step ends, so that other nodes do not wait for it.
    Each node changes from the submit folder to /: Python would search the submit folder for
    modules, and on NFS a node that has just rejoined may not see it.
    """
    own = arguments_of(job.options)
    options = [
        f"--job-name={_PREFIX}{job.name}",
        f"--partition={job.pool}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--output={job.folder / 'job.out'}",
        "--open-mode=append",
        "--no-requeue",  # the master starts the trial again
        "--export=ALL",  # from the environment passed to sbatch
    ]
    if not any(word.startswith("--cpus-per-gpu") for word in own):  # the options exclude each other
        options.append(f"--cpus-per-task={max(1, job.slots) * max(1, job.cpus)}")
    options += [f"--gpus-per-node={job.slots}"] if job.kind == "cuda" else []
    options += [f"--exclude={','.join(job.avoid)}"] if job.avoid else []
    step = "srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0"
    # a step does not inherit --cpus-per-task: see srun(1)
    step += " ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            *([f"#SBATCH {shlex.join(own)}"] if own else []),
            f"export PYTHONPATH={shlex.quote(job.pythonpath)}",
            f'exec {step} /bin/bash -c \'cd / && exec "$@" "$SLURM_NODEID" "$SLURMD_NODENAME"\' node {shlex.join(job.command)}',
            "",
        ]
    )


class Slurm:
    """The Slurm engine: each method runs a Slurm command."""

    name, seconds, remote = "slurm", 1.0, True

    def __init__(self, *, cpus: int = 1, gpus: bool = True, env: Mapping[str, str]) -> None:
        self._cpus = cpus
        self._gpus = gpus
        self._env = {name: env[name] for name in _PASSED if name in env}

    def nodes(self) -> list[Node]:
        return nodes_in(self._run(["scontrol", "show", "node", "--oneliner"]), cpus=self._cpus, gpus=self._gpus)

    def pools(self) -> tuple[str, ...]:
        found = partitions_in(self._run(["scontrol", "show", "partition", "--oneliner"]))
        if not found:
            raise ConfigError("Slurm has no partition", where="--on slurm", fix="Define one in slurm.conf.")
        return found

    def check(self, config: Mapping[str, Any]) -> None:
        section = config.get("slurm") or {}
        for key in sorted(section.keys() - {"sbatch_args"}):
            raise ConfigError(
                "is not supported here", where=f"slurm.{key}", fix="Write it as one of slurm.sbatch_args."
            )
        arguments_of(section)

    def submit(self, job: ClusterJob) -> None:
        self._run(["sbatch", "--parsable"], script(job))

    def cancel(self, name: str, *, force: bool = False) -> None:
        number, status = self._jobs().get(name, (0, JobStatus(end=JobEnd.UNKNOWN)))
        if status.end is not None:
            return
        refusal: MasterError | None = None
        for options in ([["--full", "--signal=KILL"]] if force else []) + [[]]:
            try:
                self._run(["scancel", *options, str(number)])
            except MasterError as error:  # also raised if the job has ended in the meantime
                refusal = refusal or error
        if refusal is not None:
            _, status = self._jobs().get(name, (0, JobStatus(end=JobEnd.UNKNOWN)))
            if status.end is None:
                raise refusal

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        return {name: status for name, (_, status) in self._jobs().items() if name in names}

    def close(self) -> None:
        """Do nothing: there is no connection to Slurm."""

    def _jobs(self) -> dict[str, tuple[int, JobStatus]]:
        words = ["squeue", f"--user={os.getuid()}", "--states=all", "--noheader", f"--format={_FORMAT}"]
        return jobs_in(self._run(words))

    def _run(self, words: Sequence[str], text: str = "") -> str:
        """Run a command and return its output. Raises MasterError with its error output."""
        try:
            done = subprocess.run(
                words, input=text, capture_output=True, text=True, env=self._env, timeout=_SECONDS, check=False
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{words[0]} was not found: this machine has no Slurm commands",
                where="--on slurm",
                fix="Run the master where sbatch works, with Slurm's commands on PATH.",
            ) from None
        except subprocess.TimeoutExpired:
            raise EngineBusy(f"{words[0]} did not answer within {_SECONDS:.0f} s", where=shlex.join(words)) from None
        if done.returncode:
            said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())[:500]
            complaint = said or f"exit code {done.returncode}"
            kind = EngineBusy if is_busy(complaint) else MasterError
            raise kind("Slurm rejected a command", where=shlex.join(words[:3]), got=complaint)
        return done.stdout
