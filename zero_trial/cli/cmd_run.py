"""``zero-trial run``, ``resume`` and ``launch``: train one trial on this host, resume a run, or run
a plain script on several ranks, with the options of DeepSpeed's launcher and torchrun's
rendezvous."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zero_trial
from zero_trial.cli.output import report_outcome, shown
from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.trial.runs.events import read_json
from zero_trial.trial.runs.run_layout import RunFolder, RunStatus

if TYPE_CHECKING:
    from zero_trial.launch.hosts import PlacementRequest
    from zero_trial.launch.run_experiment import CheckedRun, RunRequest
    from zero_trial.launch.script import ScriptRequest

_RUNS = Path("runs")


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "run",
        help="train one trial of an experiment",
        description="Train the trial of an experiment on this host's ranks. Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.",
    )
    add_words(parser)
    parser.add_argument(
        "--slots", type=int, metavar="N", help="ranks on this host (default: resources.slots_per_trial)"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (default: the next runs/NNNN)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="random seed (default: reproducibility.experiment_seed, or 0)"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue from the newest checkpoint in a run's folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    group = parser.add_argument_group("several hosts: run the same command on each")
    group.add_argument("--nnodes", default="", metavar="N", help="number of hosts")
    add_meeting(group)
    group.add_argument("-H", "--hostfile", metavar="FILE", help="lines of the form: host slots=N")
    parser.set_defaults(handler=lambda options: _train(request_from(options), as_json=options.json))


def add_meeting(group: Any) -> None:
    """Add the options for this host's number and the rendezvous; ``placed`` reads them."""
    group.add_argument("--node_rank", "--node-rank", type=int, metavar="K", help="the number of this host, from 0")
    group.add_argument("--master_addr", "--master-addr", default="", metavar="HOST", help="address of host 0")
    group.add_argument("--master_port", "--master-port", type=int, metavar="PORT", help="its port (default 29500)")


def placed(options: argparse.Namespace, hostfile: str | None, name: str, **more: Any) -> PlacementRequest:
    """Return the request for ranks and hosts from the options.

    Args:
        hostfile, name: text and name of the hostfile, as ``read_hostfile`` returns them.
        more: additional fields of the request.
    """
    from zero_trial.launch.hosts import PlacementRequest

    named = {field.name: getattr(options, field.name, field.default) for field in fields(PlacementRequest)}
    return PlacementRequest(**{**named, "hostfile": hostfile, "hostfile_name": name, **more})


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the experiment, the model folder and settings; ``given_words`` returns them."""
    parser.add_argument(
        "experiment_path", nargs="?", metavar="CONST.yaml", help="the experiment, or a run's config.lock.yaml"
    )
    parser.add_argument("model_dir", nargs="?", metavar="MODEL_DIR", help="the folder of the trial's module")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="trainer=PRESET (deepspeed_offload, zero_3 ...), a dotted key of the experiment or of the ds_config "
        "(zero_optimization.stage=3)",
    )


def given_words(options: argparse.Namespace) -> list[str]:
    """Return the arguments of ``add_words`` in the order in which they were typed."""
    return [word for word in (options.experiment_path, options.model_dir, *options.settings) if word is not None]


def _train(request: RunRequest, *, as_json: bool) -> int:
    from zero_trial.launch.run_experiment import check_run, repeat_command, run_experiment
    from zero_trial.launch.screen import Screen, done_line

    start = time.perf_counter()
    checked = check_run(request, os.environ)
    seconds = time.perf_counter() - start
    screen = Screen(sys.stderr if as_json else sys.stdout, quiet=as_json)
    for line in start_lines(checked, seconds):
        screen.say(line)
    outcome, folder = run_experiment(checked, request, screen)
    summary = (read_json(RunFolder(folder).summary) or None) if outcome.exit_code == 0 else None
    if as_json:
        cause = outcome.cause.headline if outcome.cause else None
        print(json.dumps({"run": str(folder), "exit_code": outcome.exit_code, "error": cause, "summary": summary}))
        return outcome.exit_code
    if summary:
        screen.say(done_line(summary))
        screen.say(f"repeat  {repeat_command(folder)}")
    code = report_outcome(outcome, folder, sys.stderr)
    if code == ExitStatus.PREEMPTED:
        screen.say(f"resume  zero-trial resume {shown(folder)}")
    return code


def request_from(options: argparse.Namespace) -> RunRequest:
    """Return the request from the options."""
    from zero_trial.experiment.experiment import read_words
    from zero_trial.launch.run_experiment import RunRequest
    from zero_trial.launch.script import read_hostfile

    hostfile, name = read_hostfile(options.hostfile) if options.hostfile else (None, "")
    words = read_words(given_words(options))
    return RunRequest(
        experiment_path=words.experiment_path,
        model_dir=words.model_dir,
        changes=words.changes,
        seed=options.seed,
        run_dir=options.run_dir,
        resume=options.resume,
        placement=placed(options, hostfile, name),
    )


def start_lines(checked: CheckedRun, seconds: float) -> list[str]:
    """Return the first lines: versions, ranks and precision, checks, and warnings. Omits the
    settings of a DeepSpeedTrial, whose own code reads the ds_config and may overwrite it."""

    torch = metadata.version("torch")
    gpus = checked.devices.gpus if "+cpu" not in torch else 0
    facts = [
        f"zero_trial {zero_trial.__version__}",
        f"torch {torch}",
        f"{checked.ranks} rank{'s' if checked.ranks != 1 else ''} on {'GPU (nccl)' if gpus else 'CPU (gloo)'}",
    ]
    config = checked.ds_config
    done = [
        f"{checked.experiment_path.name} ok",
        "ds_config ok" if config else "the trial passes its own ds_config",
        f"{checked.entrypoint} ok",
    ]
    if config is not None and not checked.entrypoint.as_determined:
        facts += [f"{config.mesh.pipe} pipeline stages"] if config.mesh.pipe > 1 else []
        facts += [f"ZeRO-{config.zero_optimization.stage}", config.precision]
    warnings = [*checked.experiment.warnings, *(config.warnings if config else ())]
    return [
        " · ".join(facts),
        f"check   {' · '.join(done)}  {seconds:.1f} s",
        *(f"warn    {warning}" for warning in warnings),
    ]


def add_resume_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "resume",
        help="continue a run from its newest checkpoint",
        description="Continue a run from its newest checkpoint, with the experiment, the model's folder and the seed of its "
        "config.lock.yaml. zero-trial run --resume RUN does the same and also accepts a changed experiment.",
    )
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="a run's folder (default: the newest in runs/)"
    )
    parser.add_argument("--slots", type=int, metavar="N", help="ranks on this host (default: as many as before)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    parser.set_defaults(handler=_resume)


def _resume(options: argparse.Namespace) -> int:
    """Resume the named run, or the newest one."""
    from zero_trial.launch.hosts import PlacementRequest
    from zero_trial.launch.run_experiment import RunRequest

    folder = _given_run(options.run) if options.run is not None else newest_run(_RUNS)
    if RunFolder(folder).status() is RunStatus.COMPLETED:
        return _say_complete(folder, as_json=options.json)
    placement = PlacementRequest(slots=options.slots)
    return _train(RunRequest(resume=folder, placement=placement), as_json=options.json)


def _say_complete(folder: Path, *, as_json: bool) -> int:
    """Print that the run is complete. Starts nothing and does not change the run's records."""
    summary = read_json(RunFolder(folder).summary)
    if as_json:
        print(json.dumps({"run": str(folder), "exit_code": ExitStatus.OK, "error": None, "summary": summary}))
    else:
        print(f"done    {folder} is complete: step {summary.get('step')} of {summary.get('total_steps')}")
        print(f"note    to train longer, raise max_length: zero-trial run CONST.yaml MODEL_DIR --resume {folder}")
    return ExitStatus.OK


def _given_run(folder: Path) -> Path:
    """Return the folder if a run has started in it; else raise ConfigError."""
    if not RunFolder(folder).config_lock.is_file():
        raise ConfigError(
            "this folder contains no run" if folder.is_dir() else "the folder does not exist",
            where="resume",
            got=str(folder),
            expected=f"a run's folder, such as runs/0001, with {RunFolder(folder).config_lock.name}",
        )
    return folder


def newest_run(root: Path) -> Path:
    """Return the run with the highest number. Raises ConfigError if there is none, or if this run
    has not started: the user does not mean an older one."""
    numbered = [path for path in root.iterdir() if path.name.isdecimal() and path.is_dir()] if root.is_dir() else []
    if not numbered:
        raise ConfigError(
            "no run was found here",
            where="resume",
            got=f"no folder {root}/NNNN in {Path.cwd().name}/",
            fix="Pass the run's folder: zero-trial resume path/to/runs/0001.",
        )
    return _given_run(max(numbered, key=lambda path: int(path.name)))


# --- launch ---------------------------------------------------------------------------------------


def add_launch_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "launch",
        help="run a plain script on several ranks",
        description="Run SCRIPT on several ranks. If one rank fails, all ranks are ended. Logs are written to <run>/logs; the "
        "output of rank 0 is shown.",
    )
    _add_hosts(parser)
    _add_rendezvous(parser)
    _add_target(parser)
    parser.set_defaults(handler=_launch)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks and hosts (DeepSpeed's launcher)")
    group.add_argument(
        *("--slots", "--num_gpus", "--num-gpus", "--nproc_per_node", "--nproc-per-node"),
        dest="slots",
        type=int,
        metavar="N",
        help="ranks per host (default: its GPUs, or 1)",
    )
    group.add_argument("-H", "--hostfile", metavar="FILE", help="lines of the form: host slots=N")
    group.add_argument("-i", "--include", default="", metavar="FILTER", help="hosts and slots to use: host1@host2:0,2")
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="hosts and slots to exclude")
    group.add_argument(
        "--num_nodes", "--num-nodes", type=int, metavar="N", help="use the first N hosts of the hostfile"
    )
    group.add_argument(
        "--launcher", choices=["none", "ssh"], default="none", help="ssh: start the hostfile's other hosts from here"
    )


def _add_rendezvous(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "rendezvous of several hosts (torchrun's options); run the same command on each host"
    )
    group.add_argument("--nnodes", default="", metavar="N", help="number of hosts, or MIN:MAX with --rdzv-endpoint")
    add_meeting(group)
    group.add_argument(
        "--rdzv_endpoint",
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="let torch's c10d rendezvous assign the hosts' order",
    )
    group.add_argument(
        "--rdzv_id", "--rdzv-id", default="zero_trial", metavar="ID", help="name of the run at the rendezvous endpoint"
    )
    group.add_argument("--standalone", action="store_true", help="one host (the default)")


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to run")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "-m", "--module", dest="kind", action="store_const", const="module", help="SCRIPT is a module's name"
    )
    kind.add_argument(
        "--no_python", "--no-python", dest="kind", action="store_const", const="program", help="SCRIPT is any program"
    )
    group.add_argument(
        "--local_rank",
        dest="local_rank",
        action="store_true",
        default=None,
        help="pass --local_rank=N to the script (default: if its source contains that option)",
    )
    group.add_argument(
        "--no_local_rank", "--no-local-rank", dest="local_rank", action="store_false", help="never pass it"
    )
    group.add_argument(
        "--as-deepspeed",
        action="store_const",
        const="1",
        help="`import deepspeed` in the ranks means zero_trial (also: ZERO_TRIAL_AS_DEEPSPEED=1)",
    )
    group.add_argument(
        "--replace-deepspeed",
        dest="as_deepspeed",
        action="store_const",
        const="replace",
        help="the same if the real deepspeed is installed",
    )
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for logs and records (default: the next runs/NNNN)"
    )
    group.add_argument("script", metavar="SCRIPT", help="the script, module or program to run")
    group.add_argument("arguments", nargs=argparse.REMAINDER, metavar="arguments", help="arguments of the script")


def _launch(options: argparse.Namespace) -> int:
    from zero_trial.launch.script import launch_script

    outcome, folder = launch_script(script_request(options), sys.stdout)
    return report_outcome(outcome, folder, sys.stderr)


def script_request(options: argparse.Namespace) -> ScriptRequest:
    """Return the ScriptRequest from the options."""
    from zero_trial.compat.deepspeed.deepspeed_table import asked_for
    from zero_trial.launch.script import ScriptRequest, read_hostfile

    hostfile, name = (None, "") if options.nnodes or options.rdzv_endpoint else read_hostfile(options.hostfile)
    if options.launcher == "ssh" and hostfile is None:
        raise ConfigError("--launcher ssh needs a hostfile", where="launch", fix="Give --hostfile FILE.")
    return ScriptRequest(
        target=options.script,
        # drop a leading "--", which only ends our own options
        arguments=tuple(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments),
        kind=options.kind or "script",
        local_rank=options.local_rank,
        as_deepspeed=options.as_deepspeed or asked_for(os.environ),
        run_dir=options.run_dir,
        placement=placed(options, hostfile, name, spread=options.launcher == "ssh"),
    )
