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

from zero_trial.cli.cmd_ckpt_convert import add_export, add_import
from zero_trial.cli.output import FOLDER_HELP, bytes_bar, say, shown
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import format_bytes, format_count, strip_control, table

if TYPE_CHECKING:
    from zero_trial.checkpoint.folder import CheckpointFolder, Damage, Inventory, SavedCheckpoint, StoredTensor
    from zero_trial.checkpoint.format import Manifest


def add_parser(subparsers: Any) -> None:
    """Add the verb and its actions."""
    parser = subparsers.add_parser(
        "ckpt",
        help="list, verify, show, export and import checkpoints",
        description="Work with existing checkpoints. No action needs the model's code, the number of ranks that wrote a checkpoint, or a "
        "GPU.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add in (_add_ls, _add_verify, _add_show, add_export, add_import):
        add(actions)


def _add_ls(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ls",
        help="list checkpoints",
        description="List the checkpoints in a folder, lowest step first: date, size, number of ranks and ZeRO stage that wrote them, and "
        "whether manifests and file sizes are right. Tensors are not read; `zero-trial ckpt verify` reads them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run's folder, a folder of checkpoints, or a checkpoint"
    )
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
    head = ("step", "saved (UTC)", "size", "files", "ranks", "stage", "name", *_trial_column("trial", listing), "")
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
        _joined(saved.facts("ranks")),
        _joined(saved.facts("zero_stage")),
        listing.name(saved),
        *_trial_column(saved.trial or "", listing),
        _state_of(saved, listing),
    )


def _trial_column(word: str, listing: CheckpointFolder) -> tuple[str, ...]:
    """Return a column if the folder holds checkpoints of several trials, else none."""
    return (word,) if len(listing.trials) > 1 else ()


def _joined(values: tuple[Any, ...]) -> str:
    """Return the values with commas; a trial's engines may differ."""
    return ",".join(map(str, values)) or "-"


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


_NAMED = 6  # tensors of a broken file that are named; --json names all


def _add_verify(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare every file with its SHA-256",
        description="Read every byte of the newest checkpoint in a folder, or of all of them, and compare it with the SHA-256 sums in the manifest. "
        "Exit code 5 if a file is damaged; the file and the tensors in it are named.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run's folder, a folder of checkpoints, or a checkpoint"
    )
    parser.add_argument("--all", action="store_true", help="verify all checkpoints in the folder, not only the newest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_verify)


def _verify(options: argparse.Namespace) -> int:
    from zero_trial.checkpoint.folder import bytes_to_read, inspect_folder

    chosen = _chosen(inspect_folder(options.folder), options.all)
    found: list[tuple[SavedCheckpoint, list[Damage]]] = []
    with closing(bytes_bar("verify", sum(map(bytes_to_read, chosen)), quiet=options.json)) as bar:
        for saved in chosen:
            found.append((saved, _damage(saved, bar.update)))
    if options.json:
        print(json.dumps({"checkpoints": [_verified(saved, damage) for saved, damage in found]}))
    else:
        for saved, damage in found:
            _print_verified(saved, damage)
    return CheckpointError.exit_code if any(damage for _, damage in found) else 0


def _damage(saved: SavedCheckpoint, progress: Any) -> list[Damage]:
    """Return what is wrong with the engines' files, and where nothing is, with what a trial has
    written beside them.
    """
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
            got=f"{len(listing.saved)} left over by saves that did not finish",
        )
    if not everything:
        listing.require_one_series("Name one, or verify them with --all.")
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
            lines.append(f"        {len(one.tensors)} tensors are in it: {', '.join(one.tensors[:_NAMED])}{more}")
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
        allow_abbrev=False,
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
    total = sum(record.bytes for record in manifest.files.values())
    yield shown(folder)
    yield f"step    {manifest.step}{_counters(inventory.state)} · {len(manifest.files)} files, {format_bytes(total)}"
    yield f"world   {_world(manifest.world)}"
    counted = f"{len(inventory.params)} parameters, {format_count(inventory.elements)} elements"
    yield f"model   {counted}, {_dtypes(inventory.params)}{_remarks(inventory)}"
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


def _counters(state: Mapping[str, Any]) -> str:
    counters = state.get("counters")
    if not isinstance(counters, Mapping):
        return ""
    said = f" · {counters.get('global_samples')} samples"
    return said + (f", {counters['skipped_steps']} steps skipped" if counters.get("skipped_steps") else "")


def _world(world: Mapping[str, Any]) -> str:
    stage, mesh = world.get("zero_stage"), world.get("mesh")
    words = [] if stage is None else [f"ZeRO-{stage}"]
    words.append(f"written by {world.get('ranks', '?')} rank{'s' * (world.get('ranks') != 1)}")
    if isinstance(mesh, list) and len(mesh) == len(AXES):
        words.append("mesh " + " ".join(f"{axis}={count}" for axis, count in zip(AXES, mesh, strict=True)))
    return " · ".join(words) + "; it loads on any number of ranks at any stage"


def _remarks(inventory: Inventory) -> str:
    """Return what makes these names less than the whole model, or more."""
    parts = f", in {inventory.parts} parallel parts" if inventory.parts > 1 else ""
    return parts + (", without the frozen ones" if inventory.without_frozen else "")


def _dtypes(params: Iterable[StoredTensor]) -> str:
    listed = list(params)
    stored = ", ".join(sorted({held.entry.dtype for held in listed})) or "none"
    lives = sorted({str(held.lives) for held in listed if held.is_master})
    return f"{stored} masters of {', '.join(lives)} weights" if lives else stored


def _optimizer(inventory: Inventory) -> Iterable[str]:
    """Yield lines on optimizer, schedule and loss scale, as far as an engine has noted them."""
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
    return {
        "name": held.name,
        "shape": list(held.entry.shape),
        "dtype": held.entry.dtype,
        "lives": held.lives,
        "part": held.part,
        "optimizer_state": dict(held.states),
    }
