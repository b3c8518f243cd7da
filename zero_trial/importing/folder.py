"""Which files a DeepSpeed checkpoint consists of, found by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zero_trial.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_OTHER = {
    "a pipeline's layers": re.compile(r"layer_\d+-model_(?:\d+-)?(?:\d+_)*model_states\.pt|layer_\d+-model_states\.pt"),
    "experts (MoE)": re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*\.pt"),
}


@dataclass(frozen=True)
class DeepSpeedFolder:
    """``models`` and ``optimizers`` by data-parallel rank; ``universal`` where DeepSpeed's own converter has been at work."""

    path: Path
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]
    universal: Path | None = None


def find_deepspeed(source: Path, tag: str | None) -> DeepSpeedFolder | None:
    """The checkpoint at ``source``: a folder of tags, or a tag's own. None if there is nothing of DeepSpeed there.

    Raises CheckpointError for one that is not whole, is in parallel parts, or has an unknown tag.
    """
    folder = _tag_folder(source, tag)
    if folder is None:
        return None
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    models, optimizers = _by_rank(folder, files, _MODEL), _by_rank(folder, files, _OPTIMIZER)
    for kind, pattern in _OTHER.items():
        found = next((name for name in files if pattern.fullmatch(name)), None)
        if found is not None:
            raise CheckpointError(
                f"a checkpoint with {kind} in files of their own is not imported",
                where=str(folder),
                got=found,
                fix="Save a whole state dict with the model's own code, and import that.",
            )
    universal = folder / "zero"
    return DeepSpeedFolder(folder, models, optimizers, universal if universal.is_dir() else None) if models else None


def _tag_folder(source: Path, tag: str | None) -> Path | None:
    if not source.is_dir():
        return None
    pointer = next((source / name for name in ("latest", "latest_universal") if (source / name).is_file()), None)
    if tag is None and pointer is not None:
        tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if tag is not None:
        folder = source / tag
        if tag in ("", ".", "..") or Path(tag).name != tag or not folder.is_dir():
            known = ", ".join(sorted(path.name for path in source.iterdir() if path.is_dir())) or "none"
            raise CheckpointError("no such tag", where=str(source), got=repr(tag), expected=f"one of: {known}")
        return folder
    if any(_MODEL.fullmatch(path.name) for path in source.iterdir()):
        return source
    inside = [
        path
        for path in sorted(source.iterdir())
        if path.is_dir() and any(_MODEL.fullmatch(file.name) for file in path.iterdir())
    ]
    if len(inside) > 1:
        raise CheckpointError(
            "there are several checkpoints and no file that says which is the latest",
            where=str(source),
            got=", ".join(path.name for path in inside),
            fix="Choose one with --tag.",
        )
    return inside[0] if inside else None


def _by_rank(folder: Path, files: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    found: dict[int, str] = {}
    for name in files:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match["part"]) != 0:
            raise CheckpointError(
                "the checkpoint of a model in parallel parts is not imported",
                where=str(folder),
                got=name,
                expected="files of mp_rank_00 alone",
                fix="Join the parts with the model's own code, save a state dict, and import that.",
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise CheckpointError(
                "two files are of one rank: one of them is left over from another save",
                where=str(folder),
                got=f"{found[rank]} and {name}",
                fix="Move the older ones away.",
            )
        found[rank] = name
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise CheckpointError(
            "a rank's file is missing",
            where=str(folder),
            got=f"none of rank {missing[0]}",
            expected=f"ranks 0 to {max(found)}",
        )
    return tuple(folder / found[rank] for rank in sorted(found))
