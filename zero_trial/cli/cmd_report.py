"""``zero-trial report``, ``board`` and ``diff``: a run or a search as one HTML page, a live page of
runs, and the differences between two runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import say, shown
from zero_trial.errors import ConfigError
from zero_trial.util.text import strip_control, table

if TYPE_CHECKING:
    from zero_trial.report.difference import RunDifference, RunRecord, SettingChange, TraceComparison
    from zero_trial.report.report_data import SweepReport


NAME = "report.html"


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write the report of a run or an experiment as one HTML page",
        description="Read a run's folder, finished or not, and write its curves, memory, configuration with provenance and checkpoints as one "
        "HTML page without external resources. For an experiment of the embedded master, or a folder of run folders, write its "
        "learning curves, the search's decisions, the swept values and the best configuration.",
    )
    _add_options(parser)


def add_sweep_parser(subparsers: Any) -> None:
    """Add ``sweep report``, an alias of ``report``."""
    words = subparsers.add_parser("sweep", help="write a search's report as one HTML page").add_subparsers(
        dest="word", metavar="WORD", required=True
    )
    what = "The same as zero-trial report."
    _add_options(words.add_parser("report", help="write a search's report", description=what))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN_FOLDER|EXPERIMENT",
        help="a run's folder, such as runs/0001, a folder of run folders, or an experiment's id",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page to write (default: RUN_FOLDER/{NAME}, sweep-ID.html, or FOLDER/sweep.html)",
    )
    parser.add_argument("--root", type=Path, help="the master's folder (default: the same as zero-trial master's)")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.report.run_page import render_run
    from zero_trial.report.run_reader import from_run_folder, from_runs, is_run
    from zero_trial.report.sweep_page import render_sweep

    folder = Path(options.run)
    runs = folder.is_dir() and any(inner.is_dir() and is_run(inner) for inner in folder.iterdir())
    if is_run(folder) or not (options.run.isdigit() or runs):
        report = from_run_folder(folder)
        _write_page(options.output or folder / NAME, render_run(report))
        _warn(report.left_out)
        return 0
    sweep = from_runs(folder) if folder.is_dir() else _of_master(int(options.run), options.root)
    output = folder / "sweep.html" if folder.is_dir() else Path(f"sweep-{options.run}.html")
    _write_page(options.output or output, render_sweep(sweep))
    for trial in sweep.trials:
        _warn(trial.left_out, f"{trial.id}/")
    return 0


def _of_master(experiment: int, root: Path | None) -> SweepReport:
    from zero_trial.cli.cmd_master import default_root
    from zero_trial.master.directory import MasterDirectory
    from zero_trial.report.master_reader import from_master_store

    return from_master_store(MasterDirectory(root or default_root(os.environ)).database, experiment)


def _warn(left_out: Iterable[str], place: str = "") -> None:
    for part in left_out:
        sys.stderr.write(strip_control(f"warn    not in the report: {place}{part}\n"))


def _write_page(path: Path, text: str) -> None:
    """Write the page and print its path."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written ({error.strerror})",
            where="--output",
            got=str(path),
            fix="Use another file.",
        ) from error
    print(f"report  {path}")


def add_board_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "board",
        help="serve a live page of the runs in a folder",
        description="Serve a read-only page of the runs in a folder, or of one run, on this machine until it is interrupted: live curves, "
        "memory, checkpoints and logs, and comparisons. The printed address contains a token, without which no request is answered. "
        "For the experiments of the embedded master, zero-trial master up prints the address of the same page.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="a folder of run folders, such as runs, or one of them"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_serve_board)


def _serve_board(options: argparse.Namespace) -> int:
    from zero_trial.report.board import serve_runs

    if not 0 <= options.port <= 65535:
        raise ConfigError("not a port number", where="--port", got=options.port, expected="0 to 65535")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def ready(address: str) -> None:
        text = json.dumps({"board": address}) if options.json else f"board  {address}\npress Ctrl-C to stop"
        print(text, flush=True)

    serve_runs(options.folder, options.port, ready, stop)
    return 0


# --- diff: differences between two runs, and the first step with different values -----------------

_LONGEST = 60  # characters of a value


def add_diff_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "diff",
        help="compare two runs, and find the first step at which they differ",
        description="Compare two runs' settings, code, data and machine, and then their values step by step: the loss of rank 0 at every "
        "step, the learning rate, the gradient norm, and the reported metrics. Exit code 0 if all is the same, 1 if something differs.",
    )
    parser.add_argument("a", type=Path, metavar="RUN_A", help="a run's folder, such as runs/0001")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="the folder of the run to compare with")
    parser.add_argument(
        "--only",
        choices=("settings", "values"),
        help="what the exit code depends on: settings, code and data; or the values",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        metavar="X",
        help="values within X of each other are equal (default: 0, every bit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_diff)


def _diff(options: argparse.Namespace) -> int:
    from zero_trial.report.difference import compare_runs, read_run

    if not 0 <= options.rtol < 1:
        raise ConfigError("not a tolerance", where="--rtol", got=options.rtol, expected="0, or a number below 1")
    a, b = read_run(options.a), read_run(options.b)
    found = compare_runs(a, b, options.rtol)
    same = {"settings": found.same_origin, "values": found.same_values}.get(options.only, found.same)
    if options.json:
        print(json.dumps(_as_dict(found, same), allow_nan=True))
    else:
        say("\n".join(_lines(a, b, found, same)))
    return 0 if same else 1


def _lines(a: RunRecord, b: RunRecord, found: RunDifference, same: bool) -> Iterator[str]:
    for name, run in (("A", a), ("B", b)):
        yield f"{name:8}{shown(run.folder)}  step {run.last_step}, {run.end or 'not ended'}"
    rows = [*_rows("setting", found.settings), *_rows("code", found.code), *_rows("data", found.data)]
    rows += _rows("machine", found.made_with)
    if rows:
        yield table([("", "", "A", "B"), *rows])
    for note in found.notes:
        yield f"note    {note}"
    equal = [trace for trace in found.traces if trace.parting is None]
    if equal:
        yield f"equal   {', '.join(f'{trace.name} ({_steps(trace.steps)})' for trace in equal)}"
    for trace in sorted(found.traces, key=lambda trace: trace.parting.step if trace.parting else 0):
        if trace.parting is not None:
            yield f"differs {_parting(trace)}"
    if found.ends is not None:
        yield f"ends    A at step {found.ends[0]}, B at step {found.ends[1]}"
    yield _verdict(found, same)


def _rows(word: str, changes: Sequence[SettingChange]) -> list[tuple[str, ...]]:
    return [(word, change.key, _short(change.a), _short(change.b)) for change in changes]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _parting(trace: TraceComparison) -> str:
    """Return ``loss of rank 0: from step 17 on, 2.3 and 2.4 (0.1 apart); equal until 16; at most
    0.3 apart, at step 90``."""
    parting = trace.parting
    if parting is None:
        return trace.name
    apart = f" ({parting.difference:.3g} apart)" if parting.difference is not None else ""
    words = [f"{trace.name}: from step {parting.step} on, {parting.a} and {parting.b}{apart}"]
    words.append("from the first common step on" if parting.before is None else f"equal until step {parting.before}")
    if parting.largest is not None:
        words.append(f"at most {parting.largest:.3g} apart, at step {parting.at}, over {_steps(trace.steps)}")
    return "; ".join(words)


def _verdict(found: RunDifference, same: bool) -> str:
    first = found.first
    if same or first is None or first.parting is None:
        return "same" if same else f"different{', although no common value differs' * bool(found.traces)}"
    between = f", equal until step {first.parting.before}" if first.parting.before is not None else ""
    return f"different from step {first.parting.step} on ({first.name}{between})"


def _as_dict(found: RunDifference, same: bool) -> dict[str, Any]:
    first = found.first
    return {
        "same": same,
        "same_settings": found.same_origin,
        "same_values": found.same_values,
        "first_step": first.parting.step if first is not None and first.parting is not None else None,
        "first_trace": first.name if first is not None else None,
        **{
            key: [asdict(change) for change in getattr(found, key)] for key in ("settings", "code", "made_with", "data")
        },
        "traces": [asdict(trace) for trace in found.traces],
        "ends": list(found.ends) if found.ends is not None else None,
        "notes": list(found.notes),
    }
