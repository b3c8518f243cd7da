"""``zero-trial launch SCRIPT``: a plain script on several ranks, with the options of DeepSpeed's
launcher and torchrun's rendezvous.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from zero_trial.cli.cmd_run import add_meeting, placed
from zero_trial.errors import ConfigError

REFUSED = {
    "--autotuning": "zero-trial tune CONST.yaml MODEL_DIR tunes an experiment, and reads ds_config's autotuning section",
    "--elastic_training": "a run has a fixed number of ranks; torch's --nnodes LEAST:MOST with --rdzv-endpoint is elastic",
    "--min_elastic_nodes": "use --nnodes LEAST:MOST with --rdzv-endpoint",
    "--max_elastic_nodes": "use --nnodes LEAST:MOST with --rdzv-endpoint",
    "--launcher_args": "put ssh's options into your ssh configuration",
    "--ssh_port": "put the port into your ssh configuration",
    "--bind_core_list": "use taskset or numactl around the command",
    "--venv_script": "the other hosts use the same path of Python as this one",
}
"""Options of DeepSpeed's launcher that are answered instead of done."""

WITHOUT_EFFECT = {
    "--save_pid": "the pids are in <run>/ranks",
    "--enable_each_rank_log": "each rank always has its own log in <run>/logs",
    "--bind_cores_to_rank": "each rank gets its share of threads (OMP_NUM_THREADS)",
    "--force_multi": "one host needs nothing special",
}
"""Options of DeepSpeed's launcher whose purpose is met without them; said in one line."""


class _Refused(argparse.Action):
    """An option that ends the command with the reason why it is not done."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        raise ConfigError(REFUSED[self.option_strings[0]], where=f"launch {option_string}")


class _WithoutEffect(argparse.Action):
    """An option that is noted and not needed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        sys.stderr.write(f"note    {option_string}: {WITHOUT_EFFECT[self.option_strings[0]]}\n")


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "launch",
        help="run a plain script on several ranks",
        description="Run SCRIPT on several ranks. If one rank fails, all ranks are ended. Logs are written to <run>/logs; the "
        "output of rank 0 is shown.",
        allow_abbrev=False,
    )
    _add_hosts(parser)
    _add_rendezvous(parser)
    _add_target(parser)
    parser.set_defaults(handler=_handle)


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
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="hosts and slots to leave out")
    group.add_argument(
        "--num_nodes", "--num-nodes", type=int, metavar="N", help="use the first N hosts of the hostfile"
    )
    group.add_argument(
        "--launcher", choices=["none", "ssh"], default="none", help="ssh: start the hostfile's other hosts from here"
    )
    group.add_argument(
        "--no_ssh", dest="launcher", action="store_const", const="none", help="the same as --launcher none"
    )
    for name in REFUSED:
        group.add_argument(name, action=_Refused, nargs="?", help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        group.add_argument(
            name, action=_WithoutEffect, nargs=1 if name == "--enable_each_rank_log" else 0, help=argparse.SUPPRESS
        )


def _add_rendezvous(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where hosts meet (torchrun's); run the same command on each host")
    group.add_argument("--nnodes", default="", metavar="N", help="number of hosts, or LEAST:MOST with --rdzv-endpoint")
    add_meeting(group)
    group.add_argument(
        "--rdzv_endpoint",
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="let torch's c10d rendezvous order the hosts",
    )
    group.add_argument(
        "--rdzv_id", "--rdzv-id", default="zero_trial", metavar="ID", help="name of the run at the endpoint"
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
        help="pass --local_rank=N to the script (default: when it or a module beside it declares that option)",
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
        help="the same where the real deepspeed is installed",
    )
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for logs and records (default: the next runs/NNNN)"
    )
    group.add_argument("script", metavar="SCRIPT", help="the script, module or program to run")
    group.add_argument("arguments", nargs=argparse.REMAINDER, metavar="arguments", help="what the script is given")


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.cli.output import report_outcome
    from zero_trial.launch.script import launch_script

    outcome, folder = launch_script(request_from(options), sys.stdout)
    return report_outcome(outcome, folder, sys.stderr)


def request_from(options: argparse.Namespace) -> Any:
    """Return the ScriptRequest that the options describe."""
    from zero_trial.compat.deepspeed.deepspeed_table import asked_for
    from zero_trial.launch.script import ScriptRequest, read_hostfile

    hostfile, name = (None, "") if options.nnodes or options.rdzv_endpoint else read_hostfile(options.hostfile)
    if options.launcher == "ssh" and hostfile is None:
        raise ConfigError("--launcher ssh needs a hostfile", where="launch", fix="Give --hostfile FILE.")
    return ScriptRequest(
        target=options.script,
        # a leading "--" only ended our own options
        arguments=tuple(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments),
        kind=options.kind or "script",
        local_rank=options.local_rank,
        as_deepspeed=options.as_deepspeed or asked_for(os.environ),
        run_dir=options.run_dir,
        placement=placed(
            options,
            hostfile,
            name,
            include=options.include,
            exclude=options.exclude,
            num_nodes=options.num_nodes,
            rdzv_endpoint=options.rdzv_endpoint,
            rdzv_id=options.rdzv_id,
            spread=options.launcher == "ssh",
        ),
    )
