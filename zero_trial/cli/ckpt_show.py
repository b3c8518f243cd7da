"""``zero-trial ckpt show CKPT``: every tensor of a checkpoint, what belongs to it, and who wrote it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.ckpt_choice import FOLDER_HELP, choose
from zero_trial.cli.output import shown, table
from zero_trial.util.text import format_bytes, format_count

if TYPE_CHECKING:
    from zero_trial.checkpoint.export import Inventory, StoredTensor
    from zero_trial.checkpoint.format import Manifest

AXES = ("pipe", "replica", "shard", "model")


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "show",
        help="tensors, shapes, dtypes, tied weights, optimizer state",
        description="Say what a checkpoint holds: who wrote it, every parameter and buffer with shape, dtype and optimizer state, and tied "
        "names. Reads the manifest alone.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help=FOLDER_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the action."""
    from zero_trial.checkpoint.export import take_inventory

    saved = choose(options.checkpoint)
    found = [(engine.folder, engine.manifest) for engine in saved.engines if engine.manifest is not None]
    if options.json:
        engines = [_as_dict(folder, manifest, take_inventory(manifest)) for folder, manifest in found]
        print(json.dumps({"folder": str(saved.folder), "step": saved.step, "engines": engines}))
        return 0
    pages = ["\n".join(_page(folder, manifest, take_inventory(manifest))) for folder, manifest in found]
    print("\n\n".join(pages) or f"{shown(saved.folder)}\nno engine has saved anything in this checkpoint")
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
    rows += [_row("param", held) for held in inventory.params]
    rows += [_row("buffer", held) for held in inventory.buffers]
    rows += [("tied", alias, "", "", f"is {name}") for alias, name in sorted(inventory.aliases.items())]
    yield ""
    yield table(rows)


def _row(word: str, held: StoredTensor) -> tuple[str, ...]:
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
    """What makes these names less than the whole model, or more."""
    parts = f", in {inventory.parts} parallel parts" if inventory.parts > 1 else ""
    return parts + (", without the frozen ones" if inventory.without_frozen else "")


def _dtypes(params: Iterable[StoredTensor]) -> str:
    listed = list(params)
    stored = ", ".join(sorted({held.entry.dtype for held in listed})) or "none"
    lives = sorted({str(held.lives) for held in listed if held.is_master})
    return f"{stored} masters of {', '.join(lives)} weights" if lives else stored


def _optimizer(inventory: Inventory) -> Iterable[str]:
    """Optimizer, schedule and loss scale, as far as an engine has noted them."""
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


def _as_dict(folder: Path, manifest: Manifest, inventory: Inventory) -> dict[str, Any]:
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
        "parameters": [_held(held) for held in inventory.params],
        "buffers": [_held(held) for held in inventory.buffers],
        "tied": dict(inventory.aliases),
        "state": state,
    }


def _held(held: StoredTensor) -> dict[str, Any]:
    return {
        "name": held.name,
        "shape": list(held.entry.shape),
        "dtype": held.entry.dtype,
        "lives": held.lives,
        "part": held.part,
        "optimizer_state": dict(held.states),
    }
