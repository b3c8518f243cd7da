"""``zero-trial ckpt``: list, verify, show, export and import checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import FOLDER_HELP, bytes_bar, say, shown
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import format_bytes, format_count, parse_size, strip_control, table

if TYPE_CHECKING:
    from zero_trial.checkpoint.export import Exported, ExportPlan
    from zero_trial.checkpoint.folder import CheckpointFolder, Damage, Inventory, SavedCheckpoint, StoredTensor
    from zero_trial.checkpoint.format import Manifest
    from zero_trial.checkpoint.range_reader import CheckpointReader
    from zero_trial.compat.importing.imported import ImportedState


_FOLDER_HELP = "a run's folder, a folder of checkpoints, or a checkpoint"


def add_parser(subparsers: Any) -> None:
    """Add the verb and its actions."""
    parser = subparsers.add_parser(
        "ckpt",
        help="list, verify, show, export and import checkpoints",
        description="Work with existing checkpoints. No action needs the model's code, the number of ranks that wrote a checkpoint, or a "
        "GPU.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add in (_add_ls, _add_verify, _add_show, _add_export, _add_import):
        add(actions)


def _add_ls(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ls",
        help="list checkpoints",
        description="List the checkpoints in a folder, lowest step first: date, size, number of ranks and ZeRO stage that wrote them, and "
        "whether manifests and file sizes are correct. Tensors are not read; `zero-trial ckpt verify` reads them.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=_FOLDER_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_list_checkpoints)


def _list_checkpoints(options: argparse.Namespace) -> int:
    from zero_trial.checkpoint.folder import inspect_folder

    listing = inspect_folder(options.folder)
    if options.json:
        print(
            json.dumps({"folder": str(listing.folder), "checkpoints": [_listed(one, listing) for one in listing.saved]})
        )
        return 0
    print(shown(listing.folder))
    trial = ("trial",) if len(listing.trials) > 1 else ()
    head = ("step", "saved (UTC)", "size", "files", "ranks", "stage", "name", *trial, "")
    print(table([head, *(_list_row(one, listing) for one in listing.saved)], right=(0, 2, 3, 4, 5)))
    sys.stdout.flush()
    for one in listing.saved:
        if one.fault is not None and not one.leftover:
            sys.stderr.write(strip_control(f"broken  {one.fault}\n"))
    return 0


def _state_of(saved: SavedCheckpoint, listing: CheckpointFolder) -> str:
    """Return ``whole``, ``latest``, ``broken`` or ``left over``."""
    if saved.leftover:
        return "left over"
    return "broken" if saved.fault is not None else "latest" if listing.is_latest(saved) else "whole"


def _list_row(saved: SavedCheckpoint, listing: CheckpointFolder) -> tuple[str, ...]:
    return (
        "-" if saved.step is None else str(saved.step),
        datetime.fromtimestamp(saved.saved, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        format_bytes(saved.bytes),
        str(saved.files),
        *(",".join(map(str, saved.facts(fact))) or "-" for fact in ("ranks", "zero_stage")),  # engines may differ
        listing.name(saved),
        *((saved.trial or "",) if len(listing.trials) > 1 else ()),
        _state_of(saved, listing),
    )


def _single(values: tuple[Any, ...]) -> Any:
    return list(values) if len(values) > 1 else next(iter(values), None)


def _listed(saved: SavedCheckpoint, listing: CheckpointFolder) -> dict[str, Any]:
    return {
        "folder": str(saved.folder),
        "step": saved.step,
        "saved": saved.saved,
        "bytes": saved.bytes,
        "files": saved.files,
        "ranks": _single(saved.facts("ranks")),
        "zero_stage": _single(saved.facts("zero_stage")),
        "mesh": _single(saved.facts("mesh")),
        "engines": [engine.folder.name for engine in saved.engines] if saved.trial is not None else [],
        "state": "whole" if saved.whole else _state_of(saved, listing),
        "latest": listing.is_latest(saved),
        "trial": saved.trial,
        "fault": saved.fault,
    }


_NAMED = 6  # listed tensors per broken file; --json lists all


def _add_verify(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare every file with its SHA-256",
        description="Read every byte of the newest checkpoint in a folder, or of all of them, and compare it with the SHA-256 sums in the manifest. "
        "Exit code 5 if a file is damaged; the file and the tensors in it are named.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=_FOLDER_HELP)
    parser.add_argument("--all", action="store_true", help="verify all checkpoints in the folder, not only the newest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_verify)


def _verify(options: argparse.Namespace) -> int:
    from zero_trial.checkpoint.folder import bytes_to_read, inspect_folder

    chosen = _chosen(inspect_folder(options.folder), options.all)
    with closing(bytes_bar("verify", sum(map(bytes_to_read, chosen)), quiet=options.json)) as bar:
        found = [(saved, _damage(saved, bar.update)) for saved in chosen]
    if options.json:
        print(json.dumps({"checkpoints": [_verified(saved, damage) for saved, damage in found]}))
    else:
        for saved, damage in found:
            _print_verified(saved, damage)
    return CheckpointError.exit_code if any(damage for _, damage in found) else 0


def _damage(saved: SavedCheckpoint, progress: Any) -> list[Damage]:
    """Return the damage in the engines' files or, if there is none, in the trial's own."""
    from zero_trial.checkpoint.folder import Damage, find_damage
    from zero_trial.trial.runs.run_checkpoints import find_fault

    found = find_damage(saved, progress)
    if not found and saved.trial is not None and (fault := find_fault(saved.folder)) is not None:
        file, _, what = fault.partition(": ")
        found.append(Damage(Path(file), what))
    return found


def _chosen(listing: CheckpointFolder, everything: bool) -> Sequence[SavedCheckpoint]:
    """Return all checkpoints, or the one with the highest step, even if it is broken."""
    counted = [saved for saved in listing.saved if listing.single or not saved.leftover]
    if not counted:
        raise ConfigError(
            "there is no finished checkpoint here",
            where=str(listing.folder),
            got=f"{len(listing.saved)} unfinished saves",
        )
    if not everything:
        listing.require_one_series("Name one checkpoint, or verify all of them with --all.")
    return counted if everything else counted[-1:]


def _print_verified(saved: SavedCheckpoint, damage: Sequence[Damage]) -> None:
    files = sum(len(engine.manifest.files) for engine in saved.engines if engine.manifest is not None)
    word = "broken" if damage else "whole"
    step = "" if saved.step is None else f"step {saved.step}  "
    print(f"{word:<8}{shown(saved.folder)}  {step}{files} files  {format_bytes(saved.bytes)}", flush=True)
    for one in damage:
        lines = [f"broken  {shown(one.file)}: {one.what.removeprefix(f'{one.file}: ')}"]
        if one.tensors:
            more = f" and {len(one.tensors) - _NAMED} more" if len(one.tensors) > _NAMED else ""
            lines.append(f"        affects {len(one.tensors)} tensors: {', '.join(one.tensors[:_NAMED])}{more}")
        sys.stderr.write(strip_control("\n".join(lines) + "\n"))


def _verified(saved: SavedCheckpoint, damage: Sequence[Damage]) -> dict[str, Any]:
    return {
        "folder": str(saved.folder),
        "step": saved.step,
        "bytes": saved.bytes,
        "whole": not damage,
        "damage": [{"file": str(one.file), "what": one.what, "tensors": list(one.tensors)} for one in damage],
    }


AXES = ("pipe", "replica", "shard", "model")


def _add_show(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "show",
        help="tensors, shapes, dtypes, tied weights, optimizer state",
        description="Show what a checkpoint holds: which ranks and ZeRO stage wrote it, every parameter and buffer with "
        "shape, dtype and optimizer state, and tied names. Reads only the manifest.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help=FOLDER_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_show)


def _show(options: argparse.Namespace) -> int:
    from zero_trial.checkpoint.folder import choose_checkpoint, take_inventory

    saved = choose_checkpoint(options.checkpoint)
    found = [(engine.folder, engine.manifest) for engine in saved.engines if engine.manifest is not None]
    if options.json:
        engines = [_shown(folder, manifest, take_inventory(manifest)) for folder, manifest in found]
        print(json.dumps({"folder": str(saved.folder), "step": saved.step, "engines": engines}))
        return 0
    pages = ["\n".join(_page(folder, manifest, take_inventory(manifest))) for folder, manifest in found]
    say("\n\n".join(pages) or f"{shown(saved.folder)}\nno engine has saved anything in this checkpoint")
    return 0


def _page(folder: Path, manifest: Manifest, inventory: Inventory) -> Iterable[str]:
    total, counters = sum(record.bytes for record in manifest.files.values()), inventory.state.get("counters")
    said = ""
    if isinstance(counters, Mapping):
        skipped = f", {counters['skipped_steps']} steps skipped" if counters.get("skipped_steps") else ""
        said = f" · {counters.get('global_samples')} samples{skipped}"
    yield shown(folder)
    yield f"step    {manifest.step}{said} · {len(manifest.files)} files, {format_bytes(total)}"
    yield f"world   {_world(manifest.world)}"
    counted = f"{len(inventory.params)} parameters, {format_count(inventory.elements)} elements"
    # reasons why these names are not exactly the whole model
    parts = f", in {inventory.parts} parallel parts" if inventory.parts > 1 else ""
    frozen = ", without the frozen ones" if inventory.without_frozen else ""
    yield f"model   {counted}, {_dtypes(inventory.params)}{parts}{frozen}"
    yield from _optimizer(inventory)
    client = inventory.state.get("client")
    if isinstance(client, Mapping) and client:
        yield f"client  {', '.join(map(str, client))}"
    rows: list[tuple[str, ...]] = [("", "name", "shape", "stored", "optimizer state")]
    rows += [_tensor_row("param", held) for held in inventory.params]
    rows += [_tensor_row("buffer", held) for held in inventory.buffers]
    rows += [("tied", alias, "", "", f"is {name}") for alias, name in sorted(inventory.aliases.items())]
    yield ""
    yield table(rows)


def _tensor_row(word: str, held: StoredTensor) -> tuple[str, ...]:
    from zero_trial.checkpoint.format import shape_text

    name = held.name if not held.stored.startswith("part") else held.stored.split("/")[0] + "/" + held.name
    dtype = f"{held.entry.dtype} (lives in {held.lives})" if held.is_master else held.entry.dtype
    kinds = [kind if own == "float32" else f"{kind} {own}" for kind, own in held.states.items()]
    return word, name, shape_text(held.entry.shape), dtype, ", ".join(kinds)


def _world(world: Mapping[str, Any]) -> str:
    stage, mesh = world.get("zero_stage"), world.get("mesh")
    words = [] if stage is None else [f"ZeRO-{stage}"]
    words.append(f"written by {world.get('ranks', '?')} rank{'s' * (world.get('ranks') != 1)}")
    if isinstance(mesh, list) and len(mesh) == len(AXES):
        words.append("mesh " + " ".join(f"{axis}={count}" for axis, count in zip(AXES, mesh, strict=True)))
    return " · ".join(words) + "; it loads on any number of ranks at any stage"


def _dtypes(params: Iterable[StoredTensor]) -> str:
    listed = list(params)
    stored = ", ".join(sorted({held.entry.dtype for held in listed})) or "none"
    lives = sorted({str(held.lives) for held in listed if held.is_master})
    return f"{stored} masters of {', '.join(lives)} weights" if lives else stored


def _optimizer(inventory: Inventory) -> Iterable[str]:
    """Yield lines about optimizer, schedule and loss scale, as far as an engine recorded them."""
    state = inventory.state
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping):
        kinds = ", ".join(sorted({kind for held in inventory.params for kind in held.states})) or "no state yet"
        groups = state.get("groups") if isinstance(state.get("groups"), list) else []
        rates = ", ".join(
            f"{group['lr']:.4g}" for group in groups or [] if isinstance(group, Mapping) and "lr" in group
        )
        yield f"update  {optimizer.get('class')}: {kinds}; {len(groups or [])} group{'s' * (len(groups or []) != 1)}, lr {rates}"
    scaler, schedule = state.get("loss_scaler"), state.get("scheduler")
    if isinstance(scaler, Mapping) and scaler.get("kind") != "static":
        yield f"scale   {scaler.get('kind')}, loss scale {scaler.get('scale')}"
    if isinstance(schedule, Mapping):
        plain = {key: value for key, value in schedule.items() if isinstance(value, (int, float, str))}
        yield f"lr      schedule at {', '.join(f'{key} {value}' for key, value in plain.items())}"


def _shown(folder: Path, manifest: Manifest, inventory: Inventory) -> dict[str, Any]:
    state = {
        key: value for key, value in inventory.state.items() if key not in ("aliases", "dtypes", "reduction_order")
    }
    return {
        "folder": str(folder),
        "step": manifest.step,
        "world": dict(manifest.world),
        "files": {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in manifest.files.items()},
        "parts": inventory.parts,
        "elements": inventory.elements,
        "parameters": [_tensor_facts(held) for held in inventory.params],
        "buffers": [_tensor_facts(held) for held in inventory.buffers],
        "tied": dict(inventory.aliases),
        "state": state,
    }


def _tensor_facts(held: StoredTensor) -> dict[str, Any]:
    facts = {name: getattr(held, name) for name in ("name", "lives", "part")}
    stored = {"shape": list(held.entry.shape), "dtype": held.entry.dtype, "optimizer_state": dict(held.states)}
    return {**facts, **stored}


# --- export and import: to and from other programs' files -----------------------------------------

_DEFAULT_SHARD = "5GB"
_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _add_export(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a model's weights as safetensors",
        description="Join the weights of a checkpoint, whatever ranks, ZeRO stage or pipeline wrote it, into safetensors files in Hugging "
        "Face's layout. Every byte is verified first. Tensors pass through in chunks of 16 MiB, so any model fits. Tied weights are written once.",
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
        help="the optimizer's fp32 masters if they exist, the weights that the model computes with, or the averages of the weights (default: "
        "masters)",
    )
    parser.add_argument("--ema", dest="weights", action="store_const", const="ema", help="the same as --weights ema")
    parser.add_argument("--shard-size", metavar="SIZE", help=f"the maximum size of a file (default: {_DEFAULT_SHARD})")
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
    from zero_trial.checkpoint.export import SUFFIX, WeightSource, file_names, plan_export, write_export
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
    file_names(options.out, len(plan.shards))  # raises for existing files before anything is read
    total = plan.bytes + (0 if options.no_verify else sum(file.bytes for file in reader.manifest.files.values()))
    with closing(bytes_bar("export", total, quiet=options.json)) as bar:
        if not options.no_verify:
            _require_whole(engine.folder, reader.manifest, bar.update)
        exported = write_export(reader, plan, options.out, bar.update)
    _print_export(options, engine.folder, plan, exported)
    return 0


def _export_dcp(options: argparse.Namespace, reader: CheckpointReader) -> int:
    from zero_trial.checkpoint.export_dcp import write_dcp

    asked = (("--dtype", options.dtype != "keep"), ("--weights", options.weights != "masters"))
    more = (("--shard-size", options.shard_size is not None), ("--part", options.part is not None))
    for option, given in (*asked, *more):
        if given:
            raise ConfigError("this option has no effect with --format dcp", where=option, fix="Remove the option.")
    if not options.no_verify:
        _require_whole(reader.folder, reader.manifest, None)
    files = write_dcp(reader, options.out, with_optimizer=not options.no_optimizer)
    if options.json:
        print(json.dumps({"checkpoint": str(reader.folder), "files": files}))
        return 0
    say(f"from    {shown(reader.folder)}")
    for path, count in files.items():
        print(f"file    {shown(Path(path))}  {format_bytes(count)}")
    return 0


def _require_whole(folder: Path, manifest: Manifest, progress: Any) -> None:
    from zero_trial.checkpoint.folder import damaged_files

    for damage in damaged_files(folder, manifest, progress):
        raise CheckpointError(
            damage.what,
            where=str(damage.file),
            fix=f"This affects {len(damage.tensors)} tensors. Export another checkpoint; nothing was written.",
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
        warning = f"warn    {count} values of {name} overflow {options.dtype} and are infinite in the file\n"
        sys.stderr.write(strip_control(warning))


def _add_import(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "import",
        help="make a checkpoint from a checkpoint of DeepSpeed, torch or Hugging Face, or from plain weights",
        description="Read a DeepSpeed checkpoint (ZeRO stage 0 to 3, any number of ranks, or a universal one), a folder of "
        "torch.distributed.checkpoint (FSDP2, torchtitan), a checkpoint-N of Hugging Face's Trainer, or plain "
        "weights (pytorch_model.bin, model.safetensors, several with an index, or any file of torch.save), and write a checkpoint that "
        "engine.load_checkpoint(OUT) resumes at any stage on any number of ranks. Neither DeepSpeed nor the model's code is needed. "
        "Pickle files are parsed as data: no code from them is imported or called.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="the folder that was passed to save_checkpoint, a tag's folder, another program's folder, or a file",
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
    """Return names by group. Raises ConfigError if the file contains anything else."""
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
    """Return the summary as JSON data."""
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
