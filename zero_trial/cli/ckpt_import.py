"""``zero-trial ckpt import SOURCE OUT``: a DeepSpeed checkpoint, or plain weights, made into a checkpoint of ours."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import shown
from zero_trial.errors import ConfigError
from zero_trial.util.text import format_bytes

if TYPE_CHECKING:
    from zero_trial.importing.imported import ImportedState


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "import",
        help="make a checkpoint from one of DeepSpeed's, or from plain weights",
        description="Read a DeepSpeed checkpoint (ZeRO stage 0 to 3, any number of ranks, or a universal one) or plain weights "
        "(pytorch_model.bin, model.safetensors, several with an index, or any file of torch.save), and write a checkpoint that "
        "engine.load_checkpoint(OUT) resumes at any stage on any number of ranks. Neither DeepSpeed nor the model's code is needed. "
        "Files of pickles are read as data: nothing that they name is imported or called.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="the folder that save_checkpoint was given, a tag's folder, or a file",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder of checkpoints: the new one is OUT/<tag>")
    parser.add_argument("--tag", help="which checkpoint of SOURCE (default: the one that its file `latest` names)")
    parser.add_argument("--as", dest="name", metavar="TAG", help="the new checkpoint's name (default: as in SOURCE)")
    parser.add_argument("--no-optimizer", action="store_true", help="weights, buffers and counters alone")
    parser.add_argument(
        "--strip", default="", metavar="PREFIX", help="take this off every name, such as module. or _forward_module."
    )
    parser.add_argument(
        "--names", type=Path, metavar="FILE", help="for ZeRO stage 0: JSON list of the names in each optimizer group"
    )
    parser.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="PATTERN",
        help="for plain weights: names that are buffers (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the action."""
    from zero_trial.importing.imported import ImportOptions, write_imported
    from zero_trial.importing.source import read_source

    names = read_names(options.names) if options.names is not None else None
    wishes = ImportOptions(not options.no_optimizer, options.strip, names, tuple(options.buffer))
    findings = read_source(options.source, options.tag, wishes)
    folder = write_imported(findings, options.out, options.name)
    facts = summary(findings, folder)
    if options.json:
        print(json.dumps(facts))
        return 0
    print(f"from       {shown(options.source)}: {findings.kind}")
    print(f"to         {shown(folder)}: {format_bytes(facts['bytes'])} in {len(findings.shards)} files")
    state = (
        f", optimizer state {' '.join(facts['kinds'])} in {facts['groups']} groups"
        if facts["kinds"]
        else ", no optimizer state"
    )
    print(
        f"holds      {facts['parameters']} parameters, {facts['buffers']} buffers{state}; step {facts['step']}, {facts['samples']} samples"
    )
    for note in findings.notes:
        print(f"note       {note}")
    for line in findings.left_out:
        print(f"left out   {line}")
    only = "" if facts["groups"] else ", load_module_only=True"
    print(f"resume     engine.load_checkpoint({str(folder.parent)!r}, tag={folder.name!r}{only})")
    return 0


def read_names(path: Path) -> list[list[str]]:
    """Names by group. Raises ConfigError for a file that holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError("this file cannot be read", where="--names", got=f"{path}: {fault}") from fault
    fine = isinstance(content, list) and all(
        isinstance(row, list) and all(isinstance(name, str) for name in row) for row in content
    )
    if not fine:
        raise ConfigError(
            "not a list of lists of names", where="--names", got=str(path), expected='[["a.weight"], ["a.bias"]]'
        )
    return [list(row) for row in content]


def summary(findings: ImportedState, folder: Path) -> dict[str, Any]:
    """What there is to say, as JSON."""
    return {
        "folder": str(folder),
        "kind": findings.kind,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "parameters": len(findings.names(lambda name: name.startswith("param/"))),
        "buffers": len(findings.names(lambda name: name.startswith("buffer/"))),
        "kinds": list(findings.state["kinds"]),
        "groups": len(findings.state["groups"]),
        "step": findings.step,
        "samples": findings.state["counters"]["global_samples"],
        "left_out": list(findings.left_out),
        "notes": list(findings.notes),
    }
