"""``zero-trial tune CONST.yaml MODEL_DIR``: the fastest ds_config that fits, by plan and short
trials."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.cmd_plan import add_planned, planned_gpus, planned_request
from zero_trial.cli.cmd_run import given_words
from zero_trial.cli.output import shown
from zero_trial.errors import ConfigError, DoesNotFit, ExitStatus, TrialError
from zero_trial.util.text import strip_control

if TYPE_CHECKING:
    from zero_trial.launch.run_experiment import CheckedRun, RunRequest
    from zero_trial.planning.compare import PlannedMachine
    from zero_trial.planning.tune_result import TuneOutcome
    from zero_trial.planning.tune_search import SearchSettings
    from zero_trial.planning.tune_space import Margin, Selection, TrainingWay

_MARGIN = 0.1  # of the planned tensors, for allocators and what no plan knows
_GPU_PROCESS = 1 << 30  # a CUDA context, kernels, NCCL's buffers


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest ds_config that fits",
        description="Find the fastest ZeRO stage, micro-batch and accumulation, schedule and way to save memory at the same global batch: "
        "the plan prunes what cannot fit, short trials on this host measure steps per second, adaptive_asha ends slow ones early. Writes "
        "one HTML page that says why. ds_config's autotuning section sets the defaults. Exit code 3 if nothing fits.",
        allow_abbrev=False,
    )
    add_planned(parser)
    parser.add_argument(
        "--trials", type=int, metavar="N", help="the most trials (default: a quarter of what fits, at least 3)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="measured steps of a trial that is not ended early (default: 16)"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="leave this key or section of the ds_config as it is (may be repeated)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="try these values of a further key of the ds_config or the experiment, such as hyperparameters.model.checkpointing",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="folder of the page and the trials, without an earlier tune's (default: the next tunes/NNNN)",
    )
    parser.add_argument("--write", action="store_true", help="write the winner's values into the ds_config's file")
    parser.add_argument("--dry-run", action="store_true", help="plan, show what would be tried, and start nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.launch.run_experiment import check_run
    from zero_trial.planning.tune_search import refuse_autotuning, search_settings
    from zero_trial.planning.tune_space import own_way, select, ways_to_train
    from zero_trial.planning.tune_trials import facts_of, weigh_way

    request = planned_request(options)
    _refuse_used(options.dir)
    if options.gpu_memory is not None and not options.dry_run:
        raise ConfigError(
            "trials run on this host, with the GPUs that are here", where="--gpu-memory", fix="Give --memory."
        )
    checked = check_run(request, os.environ)
    vary = _varied(options.vary)
    accelerator = True if options.gpu_memory is not None else None
    facts = facts_of(checked, keep=options.keep, vary=vary, accelerator=accelerator)
    tuning = checked.ds_config.autotuning  # type: ignore[union-attr]  # facts_of has refused None
    refuse_autotuning(tuning, facts.samples * checked.batch.axes.data_parallel)  # type: ignore[union-attr]
    search_settings(tuning, 1, trials=options.trials, steps=options.steps)  # refuses what is no number of them
    target = _file_to_write(checked) if options.write else None
    own = own_way(facts)
    ways = ways_to_train(facts)
    ways += [own] if own not in ways else []
    say = (lambda line: None) if options.json else _say
    with _planning(checked.devices.gpus > 0) as call:
        machine, margin = _machine(options, checked, call)
        limit = machine.limit
        say(f"plan    {len(ways)} ways to train {own.name}; limit {_size(limit)} per rank, margin {margin.describe()}")
        found = select(
            ways,
            lambda way: call(weigh_way, request, way, machine, dict(os.environ)),
            margin,
            limit,
            sizes=tuning.num_tuning_micro_batch_sizes,
            own=own,
        )
    for line in _selection_lines(found):
        say(line)
    if options.dry_run and options.json:
        print(json.dumps(_selection_json(found, limit)))
    if not found.ways:
        raise _nothing_fits(found, margin, limit)
    if options.dry_run:
        return 0
    settings = search_settings(tuning, len(found.ways), trials=options.trials, steps=options.steps)
    tune = _Tuning(request, checked, found, settings, own, margin, limit, _folder(options.dir), target, say)
    return _conclude(options, tune, _search(tune))


def _search(tune: _Tuning) -> TuneOutcome:
    """Measure ways on this host, one after another. Raises KeyboardInterrupt if the user ends it
    before one is measured."""
    from zero_trial.planning.tune_result import trial_line
    from zero_trial.planning.tune_search import TuneSearch
    from zero_trial.planning.tune_trials import run_trial

    search = TuneSearch(tune.found, tune.settings, tune.own)
    rungs = " and ".join(map(str, search.rungs))
    tune.say(f"search  {search.planned} trials of {len(tune.found.ways)} ways that fit, measured after {rungs} steps")
    try:
        while (trial := search.next_trial()) is not None:
            run_trial(tune.request, trial, search, tune.folder / f"{trial.number:04d}", os.environ)
            tune.say(trial_line(trial, search.planned, tune.own))
    except KeyboardInterrupt:
        tune.interrupt(search.outcome())
    return search.outcome()


def _varied(words: list[str]) -> dict[str, list[Any]]:
    """Return the values of each key of ``--vary``."""
    from zero_trial.schema.yaml_source import read_yaml

    found = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ConfigError("no values to try", where="--vary", got=word, expected="KEY=V1,V2")
        found[key] = list(read_yaml(f"values: [{values}]", "--vary").value["values"])
        if any(isinstance(value, (dict, list)) for value in found[key]):
            raise ConfigError("only plain values can be tried", where="--vary", got=word, expected="KEY=V1,V2")
    return found


@contextlib.contextmanager
def _planning(accelerator: bool) -> Iterator[Callable[..., Any]]:
    """Yield what calls a function with arguments; with GPUs in a process of its own, which ends
    with the block: a plan makes a CUDA context on the first GPU, whose memory the trials need."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    if not accelerator:
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise TrialError(
                "the process that plans was killed, perhaps by the kernel's out-of-memory killer", where="tune"
            ) from None


def _machine(
    options: argparse.Namespace, checked: CheckedRun, call: Callable[..., Any]
) -> tuple[PlannedMachine, Margin]:
    """Return what is planned for, and what a rank needs beside its tensors.

    On the CPU these are its processes; this one, which has loaded the same libraries, starts those
    of each trial. ``call`` calls what asks a GPU.
    """
    import torch

    from zero_trial.planning.compare import PlannedMachine
    from zero_trial.planning.memory_plan import own_process, rank_limit, rank_processes
    from zero_trial.planning.tune_space import Margin
    from zero_trial.util.text import parse_size

    if (elsewhere := planned_gpus(options)) is not None:
        return elsewhere, Margin(_MARGIN, _GPU_PROCESS)
    accelerator = checked.devices.gpus > 0 and torch.cuda.is_available()
    own = own_process()
    process = _GPU_PROCESS if accelerator else rank_processes(own, checked.own.ranks, command=own)
    limit: int | None
    if options.memory is not None:
        limit = parse_size(options.memory, "--memory")
    elif accelerator:
        limit = call(rank_limit, torch.device("cuda"), checked.own.ranks)
    else:
        limit = rank_limit(torch.device("cpu"), checked.own.ranks)
    machine = PlannedMachine("cuda" if accelerator else "cpu", limit, asked=True, one_host=True)
    return machine, Margin(_MARGIN, process)


def _selection_lines(found: Selection) -> list[str]:
    from zero_trial.util.text import format_bytes

    refused: dict[str, list[str]] = {}
    for way, why in found.pruned:
        if not why.startswith("not needed"):
            refused.setdefault(why, []).append(way.name)
    lines = []
    for why, names in refused.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"pruned  {names[0]}{more}: {why}")
    spared = len(found.pruned) - sum(map(len, refused.values()))
    lines += [f"pruned  {spared} more, which save memory that is there or have smaller micro-batches"] if spared else []
    return lines + [f"fits    {way.name}: planned {format_bytes(found.weighed[way].bytes)}" for way in found.ways]


def _selection_json(found: Selection, limit: int | None) -> dict[str, Any]:
    return {
        "limit": limit,
        "fits": [{"way": way.mapping, "bytes": found.weighed[way].bytes} for way in found.ways],
        "pruned": [{"way": way.mapping, "why": why} for way, why in found.pruned],
    }


def _nothing_fits(found: Selection, margin: Margin, limit: int | None) -> Exception:
    sizes = [weighed.bytes for weighed in found.weighed.values() if not weighed.refusal]
    if not sizes:
        first = next(iter(found.weighed.values()), None)
        return TrialError("no way to train can be planned", where="tune", got=first.refusal if first else None)
    return DoesNotFit(
        f"the least of {len(sizes)} ways needs {_size(margin.needed(min(sizes)))}, has {_size(limit)}",
        fix="Use more ranks, a shorter input, activation checkpointing, offload or a smaller model.",
    )


def _size(size: int | None) -> str:
    from zero_trial.util.text import format_bytes

    return "unknown" if size is None else format_bytes(size)


def _folder(given: Path | None) -> Path:
    from zero_trial.trial.runs.run_layout import new_run_folder

    if given is None:
        return new_run_folder(Path("tunes"))
    given.mkdir(parents=True, exist_ok=True)
    return given


def _refuse_used(given: Path | None) -> None:
    """Raise ConfigError for a folder that has the page or a trial of another tune: trials need
    folders of their own, and the page would be replaced."""
    if given is None or not given.exists():
        return
    used = [given / "tune.html", *given.glob("[0-9][0-9][0-9][0-9]")] if given.is_dir() else [given]
    found = next((path for path in used if path.exists()), None)
    if found is not None:
        what = "another tune has written into this folder" if given.is_dir() else "this is a file"
        raise ConfigError(what, where="--dir", got=str(found), expected="a folder for this tune alone")


@dataclass
class _Tuning:
    """One run of the verb: what is searched, and what has come of it."""

    request: RunRequest
    checked: CheckedRun
    found: Selection
    settings: SearchSettings
    own: TrainingWay
    margin: Margin
    limit: int | None  # of a rank's memory
    folder: Path
    target: Path | None  # the ds_config's file to write
    say: Callable[[str], None]
    interrupted: bool = False  # before its end, by the user, so that no file is written

    def interrupt(self, outcome: TuneOutcome) -> None:
        """Note that the user has ended the search. Raise KeyboardInterrupt if nothing was
        measured."""
        if outcome.best() is None:
            raise KeyboardInterrupt
        self.say("stopped the search; what follows is of the trials so far, and no file is written")
        self.interrupted, self.target = True, None


def _conclude(options: argparse.Namespace, tune: _Tuning, outcome: TuneOutcome) -> int:
    """Print the winner, write the page and, if asked for, the ds_config; return the exit code."""
    from zero_trial.planning.tune_result import TuneResult, changed_ds_config, difference
    from zero_trial.planning.tune_trials import key_in_ds_config
    from zero_trial.report.sweep_page import render_sweep

    best, checked = outcome.best(), tune.checked
    before = dict(checked.experiment.ds_config(checked.model_dir).value)
    changes = {} if best is None else _changes(best.way, tune.own)
    of_ds_config = {inside: value for key, value in changes.items() if (inside := key_in_ds_config(key)) is not None}
    settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    slots = [] if options.slots is None else ["--slots", str(options.slots)]
    command = shlex.join(["zero-trial", "run", *given_words(options), *settings, *slots])
    result = TuneResult(
        title=f"{checked.experiment_path.parent.name or checked.experiment_path.stem}, tuned",
        diff=difference(before, of_ds_config, "ds_config") or "the ds_config stays as it is",
        command=command,
        facts=_facts(tune),
        notes=_gain(outcome, tune.own),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        interrupted=tune.interrupted,
    )
    page = tune.folder / "tune.html"
    page.write_text(render_sweep(outcome.report(result)), encoding="utf-8")
    if options.json:
        trials = [
            {"way": trial.way.mapping, "speeds": trial.speeds, "why": trial.why, "seconds": trial.seconds}
            for trial in outcome.trials
        ]
        winner = None if best is None else {"way": best.way.mapping, "steps_per_second": best.speed, "changes": changes}
        print(json.dumps({"best": winner, "trials": trials, "page": str(page)}))
    if best is None:
        raise TrialError(
            "no trial could be measured",
            where="tune",
            got=outcome.trials[0].why if outcome.trials else None,
            fix=f"See {shown(tune.folder)}.",
        )
    if not options.json:
        _say(f"best    {best.way.name}: {best.speed:.3g} steps/s{' · '.join(['', *result.notes])}")
        print(result.diff)
        _say(f"page    {shown(page)}")
        _say(f"train   {command}")
    if tune.target is not None and of_ds_config:
        from zero_trial.util.files import write_atomic

        write_atomic(tune.target, changed_ds_config(before, of_ds_config))
        if not options.json:
            rest = [key for key in changes if key_in_ds_config(key) is None]
            kept = f"; not in it, but in the command: {', '.join(rest)}" if rest else ""
            _say(f"wrote   {shown(tune.target)}{kept}")
    return ExitStatus.INTERRUPTED if tune.interrupted else 0


def _changes(way: TrainingWay, own: TrainingWay) -> dict[str, Any]:
    """Return the values of a way that the experiment does not have already."""
    mine = own.mapping
    return {key: value for key, value in way.values if key not in mine or mine[key] != value}


def _gain(outcome: TuneOutcome, own: TrainingWay) -> tuple[str, ...]:
    best = outcome.best()
    mine = next((trial.speed for trial in outcome.trials if trial.way == own and trial.speed is not None), None)
    if best is None or best.speed is None or mine is None:
        return ()
    return (f"{best.speed / mine:.2f} times as fast as the ds_config was",)


def _facts(tune: _Tuning) -> tuple[tuple[str, str], ...]:
    checked = tune.checked
    batch = checked.batch.batch.train_batch_size if checked.batch is not None else 0
    return (
        ("global batch", str(batch)),
        ("ranks", str(checked.own.ranks)),
        ("memory of a rank", _size(tune.limit)),
        ("margin", tune.margin.describe()),
    )


def _file_to_write(checked: CheckedRun) -> Path:
    """Return the JSON file of the ds_config. Raises ConfigError where there is none, where it has
    what JSON does not (comments would be lost), and where the experiment lays values over it."""
    from zero_trial.ds_config.overlay import HYPERPARAMETER, base_ds_config
    from zero_trial.planning.tune_result import is_plain_json

    experiment = checked.experiment
    named = base_ds_config(experiment.plain().get("data"), experiment.hyperparameters)[1]
    path = checked.model_dir / named if isinstance(named, str) else None
    if path is None or path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            "there is no JSON file of the ds_config to write",
            where="--write",
            got="a ds_config inside the experiment" if not isinstance(named, str) else named,
            fix="Leave --write out: the values are shown at the end.",
        )
    if not is_plain_json(path.read_text(encoding="utf-8")):
        raise ConfigError(
            "the file has comments, bare words or commas that are not JSON, and they would be lost",
            where="--write",
            got=str(path),
            fix="Leave --write out: the values are shown at the end.",
        )
    over = {
        "hyperparameters.ds_config": isinstance(experiment.hyperparameters.get("ds_config"), Mapping),
        f"hyperparameters.{HYPERPARAMETER}": experiment.hyperparameters.get(HYPERPARAMETER) is not None,
    }
    if any(over.values()):
        raise ConfigError(
            "the experiment lays values over the file, which would win over what is written there",
            where=next(key for key, there in over.items() if there),
            fix="Move them into the file, or leave --write out: the values are shown at the end.",
        )
    return path


def _say(line: str) -> None:
    sys.stdout.write(strip_control(line) + "\n")
    sys.stdout.flush()
