"""``zero-trial ckpt export`` and ``ckpt import``: a checkpoint to and from other programs'
files."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import FOLDER_HELP, bytes_bar, say, shown
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import format_bytes, format_count, parse_size, strip_control

if TYPE_CHECKING:
    from zero_trial.checkpoint.export import Exported, ExportPlan
    from zero_trial.checkpoint.format import Manifest
    from zero_trial.checkpoint.range_reader import CheckpointReader
    from zero_trial.compat.importing.imported import ImportedState


_DEFAULT_SHARD = "5GB"
_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_export(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "export",
        help="write a model's weights as safetensors",
        description="Join the weights of a checkpoint, whatever ranks, ZeRO stage or pipeline wrote it, into safetensors files in Hugging "
        "Face's layout. Every byte is verified first. Tensors pass through in chunks of 16 MiB, so any model fits. Tied weights are written once.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help=FOLDER_HELP)
    parser.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="a folder, for model.safetensors or shards with an index; or a new *.safetensors",
    )
    parser.add_argument(
        "--dtype",
        default="keep",
        choices=tuple(_DTYPES),
        help="dtype of all floating-point tensors (default: keep, as stored)",
    )
    parser.add_argument(
        "--weights",
        default="masters",
        choices=("masters", "model", "ema"),
        help="the optimizer's fp32 masters where there are any, the weights that the model computes with, or the averages "
        "of the weights (default: masters)",
    )
    parser.add_argument("--ema", dest="weights", action="store_const", const="ema", help="the same as --weights ema")
    parser.add_argument("--shard-size", metavar="SIZE", help=f"the largest size of a file (default: {_DEFAULT_SHARD})")
    parser.add_argument("--part", type=int, metavar="K", help="for a model-parallel checkpoint: which part, from 0")
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=("safetensors", "dcp"),
        help="dcp: a folder of torch.distributed.checkpoint with the optimizer's state, for FSDP2 (default: safetensors)",
    )
    parser.add_argument("--no-optimizer", action="store_true", help="with --format dcp: without the optimizer's state")
    parser.add_argument("--no-verify", action="store_true", help="skip the comparison with the SHA-256 sums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_export)


def _export(options: argparse.Namespace) -> int:
    from zero_trial.checkpoint.export import (
        SUFFIX,
        WeightSource,
        file_names,
        plan_export,
        write_export,
    )
    from zero_trial.checkpoint.folder import choose_checkpoint, only_engine, take_inventory
    from zero_trial.checkpoint.range_reader import CheckpointReader

    engine = only_engine(choose_checkpoint(options.checkpoint))
    reader = CheckpointReader(engine.folder)
    if options.format == "dcp":
        return _export_dcp(options, reader)
    one_file = options.out.suffix == SUFFIX and options.shard_size is None
    plan = plan_export(
        take_inventory(reader.manifest),
        weights=WeightSource(options.weights),
        dtype=_DTYPES[options.dtype],
        part=options.part,
        shard_bytes=None if one_file else parse_size(options.shard_size or _DEFAULT_SHARD, "--shard-size"),
        where=str(engine.folder),
    )
    file_names(options.out, len(plan.shards))  # what is in the way is said before anything is read
    total = plan.bytes + (0 if options.no_verify else sum(file.bytes for file in reader.manifest.files.values()))
    with closing(bytes_bar("export", total, quiet=options.json)) as bar:
        if not options.no_verify:
            _verify(engine.folder, reader.manifest, bar.update)
        exported = write_export(reader, plan, options.out, bar.update)
    _print_export(options, engine.folder, plan, exported)
    return 0


def _export_dcp(options: argparse.Namespace, reader: CheckpointReader) -> int:
    from zero_trial.checkpoint.export_dcp import write_dcp

    asked = (("--dtype", options.dtype != "keep"), ("--weights", options.weights != "masters"))
    more = (("--shard-size", options.shard_size is not None), ("--part", options.part is not None))
    for option, given in (*asked, *more):
        if given:
            raise ConfigError("it has no meaning with --format dcp", where=option, fix="Leave it out.")
    if not options.no_verify:
        _verify(reader.folder, reader.manifest, None)
    files = write_dcp(reader, options.out, with_optimizer=not options.no_optimizer)
    if options.json:
        print(json.dumps({"checkpoint": str(reader.folder), "files": files}))
        return 0
    say(f"from    {shown(reader.folder)}")
    for path, count in files.items():
        print(f"file    {shown(Path(path))}  {format_bytes(count)}")
    return 0


def _verify(folder: Path, manifest: Manifest, progress: Any) -> None:
    from zero_trial.checkpoint.folder import damaged_files

    for damage in damaged_files(folder, manifest, progress):
        raise CheckpointError(
            damage.what,
            where=str(damage.file),
            fix=f"{len(damage.tensors)} tensors are in it. Export another checkpoint; nothing was written.",
        )


def _print_export(options: argparse.Namespace, folder: Path, plan: ExportPlan, exported: Exported) -> None:
    from zero_trial.checkpoint.export import kinds_text

    if options.json:
        files = {str(path): count for path, count in exported.files.items()}
        facts = {"checkpoint": str(folder), "took": plan.took, "tensors": len(plan.items), "bytes": plan.bytes}
        print(json.dumps({**facts, "files": files, "tied": dict(plan.aliases), "overflowed": exported.overflowed}))
        return
    elements = sum(item.elements for item in plan.items)
    say(f"from    {shown(folder)}")
    say(f"took    {plan.took}")
    kinds = kinds_text(item.dtype for item in plan.items)
    say(f"wrote   {len(plan.items)} tensors, {format_count(elements)} elements, {format_bytes(plan.bytes)}, {kinds}")
    if plan.aliases:
        say(f"tied    {', '.join(f'{alias} = {name}' for alias, name in plan.aliases.items())}: written once")
    for path, count in exported.files.items():
        print(f"file    {shown(path)}  {format_bytes(count)}")
    sys.stdout.flush()
    for name, count in exported.overflowed.items():
        warning = f"warn    {count} values of {name} are beyond what {options.dtype} holds: infinite now\n"
        sys.stderr.write(strip_control(warning))


def add_import(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "import",
        help="make a checkpoint from one of DeepSpeed's, torch's or Hugging Face's, or from plain weights",
        description="Read a DeepSpeed checkpoint (ZeRO stage 0 to 3, any number of ranks, or a universal one), a folder of "
        "torch.distributed.checkpoint (FSDP2, torchtitan), a checkpoint-N of Hugging Face's Trainer, or plain "
        "weights (pytorch_model.bin, model.safetensors, several with an index, or any file of torch.save), and write a checkpoint that "
        "engine.load_checkpoint(OUT) resumes at any stage on any number of ranks. Neither DeepSpeed nor the model's code is needed. "
        "Pickle files are parsed as data: no code from them is imported or called.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="the folder that save_checkpoint was given, a tag's folder, another program's folder, or a file",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder of checkpoints: the new one is OUT/<tag>")
    parser.add_argument("--tag", help="which checkpoint of SOURCE (default: the one named by its file `latest`)")
    parser.add_argument("--as", dest="name", metavar="TAG", help="the new checkpoint's name (default: as in SOURCE)")
    parser.add_argument("--no-optimizer", action="store_true", help="import only weights, buffers and counters")
    parser.add_argument(
        "--strip",
        default="",
        metavar="PREFIX",
        help="remove this prefix from every name, such as module. or _forward_module.",
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
    parser.set_defaults(handler=_import)


def _import(options: argparse.Namespace) -> int:
    from zero_trial.compat.importing.foreign_source import read_source
    from zero_trial.compat.importing.imported import ImportOptions, write_imported

    names = read_names(options.names) if options.names is not None else None
    wanted = ImportOptions(not options.no_optimizer, options.strip, names, tuple(options.buffer))
    imported = read_source(options.source, options.tag, wanted)
    folder = write_imported(imported, options.out, options.name)
    facts = _summary(imported, folder)
    if options.json:
        print(json.dumps(facts))
        return 0
    say(f"from       {shown(options.source)}: {imported.kind}")
    say(f"to         {shown(folder)}: {format_bytes(facts['bytes'])} in {len(imported.shards)} files")
    state = (
        f", optimizer state {' '.join(facts['kinds'])} in {facts['groups']} groups"
        if facts["kinds"]
        else ", no optimizer state"
    )
    say(
        f"holds      {facts['parameters']} parameters, {facts['buffers']} buffers{state}; step {facts['step']}, {facts['samples']} samples"
    )
    for note in imported.notes:
        say(f"note       {note}")
    for line in imported.left_out:
        say(f"left out   {line}")
    only = "" if facts["groups"] else ", load_module_only=True"
    say(f"resume     engine.load_checkpoint({str(folder.parent)!r}, tag={folder.name!r}{only})")
    return 0


def read_names(path: Path) -> list[list[str]]:
    """Return names by group. Raises ConfigError for a file that holds something else."""
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


def _summary(imported: ImportedState, folder: Path) -> dict[str, Any]:
    """Return what there is to say, as JSON."""
    return {
        "folder": str(folder),
        "kind": imported.kind,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "parameters": len(imported.names(lambda name: name.startswith("param/"))),
        "buffers": len(imported.names(lambda name: name.startswith("buffer/"))),
        "kinds": list(imported.state["kinds"]),
        "groups": len(imported.state["groups"]),
        "step": imported.step,
        "samples": imported.state["counters"]["global_samples"],
        "left_out": list(imported.left_out),
        "notes": list(imported.notes),
    }
