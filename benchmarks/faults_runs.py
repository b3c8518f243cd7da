"""Faults of whole runs: killed ranks, a full disk, losses that are not finite, requests to stop;
each run is started again and compared.

A run here is the command that the launcher starts on each rank (``python -m zero_trial.run``), in
processes that may die. The launcher itself would end the remaining ranks after a failure; here they
get :data:`GRACE` seconds to end.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import faults_trial as trial
from benchmarks.faults_trial import PERIOD, STEPS, Plan
from tests.support.fresh_ranks import Ended, fresh_ranks

# seconds after one rank failed: the others must end on their own long before
GRACE = 30.0
KILLED, PREEMPTED, BROKEN = -9, 75, 5
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Result:
    """One injection: its kind, whether the promise held, the seconds it took, and the reason if
    not."""

    kind: str
    held: bool
    seconds: float = 0.0
    why: str = ""


class Workbench:
    """A folder for runs, a random generator, and the uninterrupted run to compare with."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self._number = 0
        self._unbroken: dict[str, Path] = {}
        trial.write_project(folder / "model")

    def new_run(self, plan: Plan, folder: Path | None = None) -> Path:
        self._number += 1
        run = (folder or self.folder) / f"run-{self._number:04d}"
        trial.write_experiment(run, plan)
        return run

    def run_fresh(self, run: Path, plan: Plan, ranks: int = 2) -> list[Ended]:
        with self.start(run, plan, ranks) as started:
            return started.wait(GRACE)

    def start(self, run: Path, plan: Plan, ranks: int = 2) -> Any:
        trial.write_experiment(run, plan)
        arguments = (str(self.folder / "model"), str(run), plan)
        return fresh_ranks(ranks, trial.rank_main, *arguments, log=self.log(run), limit=120.0)

    def log(self, run: Path) -> Path:
        return run.with_name(run.name + ".log")

    def unbroken(self, plan: Plan) -> Path:
        """Return the run without the fault."""
        calm = replace(plan, what="", tap=None, count_taps=False, pause=0.0)
        key = json.dumps(trial.experiment(calm), sort_keys=True)
        if key not in self._unbroken:
            run = self.new_run(calm)
            ended = self.run_fresh(run, calm)
            if [end.code for end in ended] != [0, 0]:
                raise RuntimeError(f"the unbroken run failed: {trial.words_of(self.log(run), [0, 1])[-2000:]}")
            self._unbroken[key] = run
        return self._unbroken[key]

    def copy(self, run: Path) -> Path:
        """Copy what ``run`` has left to another folder."""
        self._number += 1
        target = self.folder / f"run-{self._number:04d}"
        shutil.copytree(run, target)
        return target

    def resumed(self, run: Path, plan: Plan) -> str:
        """Start ``run`` again without its fault; return how it differs from the uninterrupted run,
        or an empty string."""
        calm = replace(plan, what="", tap=None, count_taps=False, pause=0.0)
        (run / "preempt").unlink(missing_ok=True)  # as the launcher does
        ended = self.run_fresh(run, calm)
        if [end.code for end in ended] != [0, 0]:
            return f"the restart ended with {[end.code for end in ended]}: {self.last_words(run)}"
        if trial.bits(run) != trial.bits(self.unbroken(plan)):
            return "the restarted run has other bits"
        left = trial.leftovers(run)
        return f"left behind: {', '.join(left)}" if left else ""

    def last_words(self, run: Path) -> str:
        words = trial.words_of(self.log(run), range(4)).strip().splitlines()
        return next((line for line in reversed(words) if line.startswith("error")), words[-1] if words else "")[:300]

    def since_fired(self, run: Path, ended: list[Ended], begin: float) -> float:
        """Return the seconds from the fault to the end of the last rank."""
        rows = [row["time"] for notes in trial.noted(run, trial.FIRED).values() for row in notes]
        return begin + max(end.seconds for end in ended) - min(rows) if rows else 0.0


def last_step(run: Path) -> int:
    """Return the last step that any rank has begun."""
    rows = [row["step"] for notes in trial.noted(run, trial.SEEN).values() for row in notes]
    return max(rows, default=-1) + 1


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a rank has begun ``step``. Raises TimeoutError after a minute."""
    end = time.monotonic() + 60
    while last_step(run) <= step:
        if time.monotonic() > end:
            raise TimeoutError(f"no rank of {run} has begun step {step}")
        time.sleep(0.002)


def first_step_again(run: Path, before: int) -> int:
    """Return the step at which rank 0 continued after it had written ``before`` lines."""
    rows = trial.noted(run, trial.SEEN).get(0, [])[before:]
    return int(rows[0]["step"]) if rows else STEPS


def kill_one(workbench: Workbench, count: int) -> Iterator[Result]:
    """F1: SIGKILL to one rank at a random moment of a random step, one time in seven while the run
    starts; the run is started again."""
    plan = Plan(pause=0.02)
    workbench.unbroken(plan)
    probe = workbench.new_run(plan)
    length = max(end.seconds for end in workbench.run_fresh(probe, plan))
    for _ in range(count):
        run, victim = workbench.new_run(plan), workbench.chance.randrange(2)
        moment = workbench.chance.uniform(-2, STEPS)
        with workbench.start(run, plan) as started:
            if moment < 0:
                time.sleep(-moment / 2 * length)
            else:
                wait_for_step(run, int(moment))
                time.sleep(moment % 1 * plan.pause)
            killed = time.monotonic()
            started.kill(victim)
            ended = started.wait(GRACE)
        seconds = time.monotonic() - killed
        done = last_step(run)
        before = len(trial.noted(run, trial.SEEN).get(0, []))
        began = done > 0
        why = ""
        if ended[1 - victim].code not in (0, BROKEN, None) or (began and ended[1 - victim].code is None):
            why = f"the other rank ended with {ended[1 - victim].code}: {workbench.last_words(run)}"
        why = why or workbench.resumed(run, plan)
        if not why and done - first_step_again(run, before) > PERIOD:
            why = f"lost {done - first_step_again(run, before)} steps"
        yield Result("before the first step" if not began else "in training", not why, seconds if began else 0.0, why)


def kill_in_save(workbench: Workbench, count: int) -> Iterator[Result]:
    """F2: SIGKILL to all ranks at every moment of a save. ``count``: times each."""
    for rank, index, name in moments(workbench) * count:
        yield kill_at(workbench, rank, index, name)


DECOUPLED = {"checkpoint": {"writer": {"decoupled": True}}}


def kill_in_background(workbench: Workbench, count: int) -> Iterator[Result]:
    """F17: the same for a save that runs in the background during training."""
    for rank, index, name in moments(workbench, DECOUPLED) * count:
        yield kill_at(workbench, rank, index, name, DECOUPLED)


def moments(workbench: Workbench, ds_config: Mapping[str, Any] = NOTHING) -> list[tuple[int, int, str]]:
    """Return rank, number and name of each change that a save makes to the disk."""
    plan = Plan(count_taps=True, ds_config=ds_config)
    probe = workbench.new_run(plan)
    workbench.run_fresh(probe, plan)
    return [
        (rank, index, row["event"])
        for rank, rows in trial.noted(probe, trial.FIRED).items()
        for index, row in enumerate(rows)
    ]


def kill_at(workbench: Workbench, rank: int, index: int, name: str, ds_config: Mapping[str, Any] = NOTHING) -> Result:
    """Kill all ranks at one moment: the checkpoints left behind must load, and the run must
    continue from them."""
    plan = Plan(tap=(rank, index), ds_config=ds_config)
    run = workbench.new_run(plan)
    ended = workbench.run_fresh(run, plan)
    why = "" if [end.code for end in ended] == [KILLED, KILLED] else f"not killed: {[end.code for end in ended]}"
    why = why or unreadable(run)
    why = why or workbench.resumed(run, plan)
    return Result(f"rank {rank}: {name}", not why, 0.0, why)


def unreadable(run: Path) -> str:
    """Return what is wrong with the finished checkpoints after a kill: there must be those of the
    first or the first two periods."""
    from zero_trial.errors import ZeroTrialError

    try:
        steps = trial.whole_steps(run)
    except ZeroTrialError as error:
        return str(error)
    return "" if steps in ([PERIOD], [PERIOD, 2 * PERIOD]) else f"checkpoints {steps}"


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "512k") -> Iterator[Path | None]:
    """Mount a file system of that size in ``folder``, or return None if this user may not mount."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield folder if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


FULL = (
    ("file system full", "full", (0, 1)),
    ("one rank's files limited", "file size", (0,)),
    ("one rank's files limited", "file size", (1,)),
    ("the folder is a file now", "no folder", (0, 1)),
    ("one rank cannot open files", "open files", (1,)),
    ("file system full, in the background", "full", (0, 1)),
    ("one rank's files limited, in the background", "file size", (1,)),
)


def full_disk(workbench: Workbench, count: int) -> Iterator[Result]:
    """F3: the disk is full at a random byte of the second checkpoint."""
    for number in range(count):
        kind, what, ranks = FULL[number % len(FULL)]
        room = workbench.chance.randrange(0, 60_000 if what == "full" else 12_000)
        config = DECOUPLED if "background" in kind else {}
        number_of = 3 if what == "open files" else room
        plan = Plan(what, step=2 * PERIOD - 1, ranks=ranks, number=number_of, ds_config=config)
        if what != "full":
            yield break_disk(workbench, kind, plan, workbench.new_run(plan))
            continue
        with small_disk(workbench.folder / f"disk-{number}") as folder:
            if folder is not None:
                yield break_disk(workbench, kind, plan, workbench.new_run(plan, folder))


def break_disk(workbench: Workbench, kind: str, plan: Plan, run: Path) -> Result:
    """Run one injection: exit code 5 on all ranks or none, no traceback, the previous checkpoint
    intact, no temporary files left."""
    begin = time.monotonic()
    log = workbench.folder / f"{run.name}.log"
    arguments = (str(workbench.folder / "model"), str(run), plan)
    with fresh_ranks(2, trial.rank_main, *arguments, log=log, limit=120.0) as started:
        ended = started.wait(GRACE)
    seconds = workbench.since_fired(run, ended, begin)
    codes = {end.code for end in ended}
    words = trial.words_of(log, [0, 1])
    if plan.what == "no folder" and (run / "moved").is_dir():
        (run / "checkpoints").unlink()
        (run / "moved").rename(run / "checkpoints")
    why = "" if codes in ({0}, {BROKEN}) else f"exit codes {[end.code for end in ended]}: {words.strip()[-300:]}"
    why = why or ("a traceback" if "Traceback" in words else "")
    why = why or (f"left behind: {trial.leftovers(run)}" if trial.leftovers(run) else "")
    why = why or ("" if trial.whole_steps(run)[:1] == [PERIOD] else f"checkpoints {trial.whole_steps(run)}")
    (run / "ballast").unlink(missing_ok=True)
    return Result(kind, not why, seconds, why)


def same_samples(workbench: Workbench, count: int) -> Iterator[Result]:
    """F7: stop at a random step and resume, also on another number of ranks: no sample is repeated
    or skipped."""
    for number in range(count):
        hparams = {"workers": 2 * (number % 4 == 3)}
        unbroken = trial.ids_by_step(workbench.unbroken(Plan(hparams=hparams)))
        plan = Plan("preempt", step=workbench.chance.randrange(1, STEPS - 1), hparams=hparams)
        run = workbench.new_run(plan)
        ended = workbench.run_fresh(run, plan)
        then = (2, 1, 4, 2)[number % 4]
        calm = replace(plan, what="")
        (run / "preempt").unlink(missing_ok=True)
        more = workbench.run_fresh(run, calm, then)
        codes = [end.code for end in ended], [end.code for end in more]
        why = "" if codes == ([PREEMPTED] * 2, [0] * then) else f"exit codes {codes}: {workbench.last_words(run)}"
        if not why and trial.ids_by_step(run) != unbroken:
            why = f"stopped after step {plan.step + 1}: other samples"
        kind = f"2 ranks, then {then}" + (", workers" if hparams["workers"] else "")
        yield Result(kind, not why, 0.0, why)


def not_finite(workbench: Workbench, count: int) -> Iterator[Result]:
    """F8: one rank's loss or gradient is not finite in one step."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    kinds = (
        ("nan", {}),
        ("inf", {}),
        ("nan gradient", {}),
        ("nan gradient", fp16),
        ("nan gradient", {"zero_optimization": {"stage": 3}}),
    )
    for number in range(count):
        what, config = kinds[number % len(kinds)]
        rank = workbench.chance.randrange(2)
        plan = Plan(what, step=workbench.chance.randrange(PERIOD, STEPS - 1), ranks=(rank,), ds_config=config)
        run, begin = workbench.new_run(plan), time.monotonic()
        ended = workbench.run_fresh(run, plan)
        seconds = workbench.since_fired(run, ended, begin)
        codes = [end.code for end in ended]
        skips = what == "nan gradient"
        why = "" if codes == ([0, 0] if skips else [4, 4]) else f"exit codes {codes}: {workbench.last_words(run)}"
        # if the first loss scale is too high, a skipped step is normal
        if not why and "fp16" not in config:
            words = trial.words_of(workbench.log(run), [0, 1])
            # the engine counts the steps before, a trial the steps up to this one
            step = plan.step + (not skips)
            named = f"rank {rank}" in words and f"step {step}" in words
            why = "" if named else f"rank {rank}, step {step} not named: {workbench.last_words(run)}"
        if not why and not finite(run):
            why = f"step {plan.step + 1}: a checkpoint with values that are not finite was kept"
        kind = what + (", fp16" if "fp16" in config else "") + (": skipped" if skips else ": ended")
        yield Result(kind, not why, seconds, why)


def finite(run: Path) -> bool:
    """Return whether every weight of every checkpoint is finite."""
    import torch

    from zero_trial.checkpoint.range_reader import CheckpointReader

    for folder in (run / "checkpoints").glob("step-??????/model0"):
        reader = CheckpointReader(folder)
        if not all(torch.isfinite(reader.read(name)).all() for name in reader.shapes if name.startswith("param")):
            return False
    return True


def asked_to_stop(workbench: Workbench, count: int) -> Iterator[Result]:
    """F12: SIGTERM to one rank or to all, or the file of a preemption."""
    for number in range(count):
        what, ranks = (("term", (0, 1)), ("term", (1,)), ("preempt", (0, 1)))[number % 3]
        plan = Plan(what, step=workbench.chance.randrange(STEPS - 1), ranks=ranks)
        run, begin = workbench.new_run(plan), time.monotonic()
        ended = workbench.run_fresh(run, plan)
        seconds = workbench.since_fired(run, ended, begin)
        codes = [end.code for end in ended]
        why = "" if codes == [PREEMPTED] * 2 else f"exit codes {codes}: {workbench.last_words(run)}"
        if not why and (plan.step + 1) not in trial.whole_steps(run):
            why = f"stopped in step {plan.step + 1}, checkpoints of {trial.whole_steps(run)}"
        why = why or workbench.resumed(run, plan)
        kind = "SIGTERM to " + ("all" if len(ranks) == 2 else "one") if what == "term" else "preempt file"
        yield Result(kind, not why, seconds, why)


def uneven(workbench: Workbench, count: int) -> Iterator[Result]:
    """F13: ranks whose loaders have different lengths: the shortest defines the epoch for all."""
    for number in range(count):
        plan = Plan(hparams={"uneven": 1 + number % 3})
        run = workbench.new_run(plan)
        ended = workbench.run_fresh(run, plan)
        codes = [end.code for end in ended]
        why = "" if codes == [0, 0] else f"exit codes {codes}: {workbench.last_words(run)}"
        if not why and '"kind": "note"' not in (run / "events.jsonl").read_text():
            why = "nothing was said"
        yield Result(f"differ by {1 + number % 3}", not why, max(end.seconds for end in ended), why)


def out_of_memory(workbench: Workbench, count: int) -> Iterator[Result]:
    """F14: memory runs out in one rank's forward."""
    for _ in range(count):
        rank = workbench.chance.randrange(2)
        plan = Plan("out of memory", step=workbench.chance.randrange(PERIOD, STEPS), ranks=(rank,))
        run, begin = workbench.new_run(plan), time.monotonic()
        ended = workbench.run_fresh(run, plan)
        seconds = workbench.since_fired(run, ended, begin)
        codes = [end.code for end in ended]
        words = trial.words_of(workbench.log(run), [rank])
        why = (
            "" if (codes[rank], codes[1 - rank]) == (3, BROKEN) else f"exit codes {codes}: {workbench.last_words(run)}"
        )
        why = why or ("" if "Halve train_micro_batch_size_per_gpu" in words else "no suggestion")
        why = why or ("" if trial.whole_steps(run) else "no checkpoint is intact")
        why = why or workbench.resumed(run, plan)
        yield Result("in the forward of one rank", not why, seconds, why)


def straggler(workbench: Workbench, count: int) -> Iterator[Result]:
    """F9: from a random step on, one rank is five times slower; every second run has no
    straggler."""
    for number in range(count):
        rank, slow = workbench.chance.randrange(2), number % 2 == 0
        first = workbench.chance.randrange(8)
        longer = {
            "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 32}},
            "min_checkpoint_period": {"batches": 0},
        }
        plan = Plan("slow" if slow else "", first, (rank,), number=0.08, pause=0.02, experiment=longer)
        run = workbench.new_run(plan)
        ended = workbench.run_fresh(run, plan)
        codes = [end.code for end in ended]
        why = "" if codes == [0, 0] else f"exit codes {codes}: {workbench.last_words(run)}"
        why = why or named_rightly(run, rank if slow else None, first)
        yield Result("slow" if slow else "clean", not why, 0.0, why)


def named_rightly(run: Path, rank: int | None, first: int) -> str:
    """Return what is wrong with the straggler reports: they must name the slow rank within 20
    steps, and no other rank."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    said = [event["message"] for event in events if "delays the others:" in event.get("message", "")]
    if rank is None:
        return f"a false alarm: {said[0]}" if said else ""
    if [words for words in said if words.startswith(f"rank {rank} ")] != said[:1] or not said:
        return f"rank {rank} was slow, and said was {said}"
    end = int(re.findall(r"steps \d+ to (\d+)", said[0])[0])
    return "" if end <= first + 20 else f"named only after step {end}, slow from step {first + 1} on"
