"""Data read from another program's files, and writing it as a zero_trial checkpoint. The engine
state besides tensors (counters, loss scale, groups, client state) is derived from DeepSpeed's."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import MANIFEST_NAME, Slice, check_tag
from zero_trial.checkpoint.state_tree import encode_state
from zero_trial.checkpoint.writer import DurableFiles, begin, commit, write_rank
from zero_trial.compat.importing.torch_file import UnknownObject, as_dict, as_integers, as_list
from zero_trial.errors import CheckpointError


@dataclass(frozen=True)
class ImportOptions:
    """The user's options.

    Attributes:
        strip: a prefix to remove from all names.
        names: the parameters of each optimizer group.
        buffers: patterns of names that are buffers.
    """

    with_optimizer: bool = True
    strip: str = ""
    names: Sequence[Sequence[str]] | None = None
    buffers: tuple[str, ...] = ()

    def own(self, name: str) -> str:
        """Return the model's name for a name of the source."""
        return name.removeprefix(self.strip) if self.strip else name


@dataclass(frozen=True)
class ImportedState:
    """Another program's checkpoint in the form of an engine's.

    Attributes:
        shards: a row of slices per output file.
        state: an engine's state, with tensors.
        left_out: a line for each lost item.
    """

    kind: str
    tag: str
    shards: Sequence[Sequence[Slice]]
    state: Mapping[str, Any]
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()
    world: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.state["counters"]["global_steps"])

    def names(self, wanted: Callable[[str], bool]) -> list[str]:
        """List the matching names of logical tensors, without duplicates."""
        return sorted({part.name for shard in self.shards for part in shard if wanted(part.name)})


def folder_name(folder: Path) -> str:
    """Return a folder's own name, also if the path is ``.`` or ``..``."""
    return Path(os.path.abspath(folder)).name


BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of buffers in floating point; integers and booleans are buffers under any name."""


def is_buffer(name: str, tensor: torch.Tensor, patterns: Iterable[str]) -> bool:
    """Return whether a tensor is not trainable, or its name matches a buffer pattern."""
    return not tensor.dtype.is_floating_point or any(fnmatchcase(name, pattern) for pattern in (*BUFFERS, *patterns))


def fresh_state() -> dict[str, Any]:
    """Return an engine's state before its first step, for weights without a state."""
    return {
        "counters": {"global_steps": 0, "global_samples": 0, "micro_steps": 0, "skipped_steps": 0},
        "loss_scaler": {"kind": "static", "scale": 1.0},
        "scheduler": None,
        "optimizer": None,
        "groups": [],
        "scalars": {},
        "kinds": [],
        "reduction_order": None,
        "aliases": {},
        "ds_config": {},
        "client": {},
    }


def write_imported(imported: ImportedState, directory: Path, tag: str | None = None) -> Path:
    """Write ``<directory>/<tag>``: one file per shard, each tensor read from the source's memory
    map as it is written.

    Writes no per-rank state, because random generator states of another program do not apply.
    Raises CheckpointError, leaving no files, also if a checkpoint has this name: a run may have
    continued from an earlier import.
    """
    disk, final = DurableFiles(), directory / check_tag(tag or imported.tag)
    if (final / MANIFEST_NAME).exists():
        raise CheckpointError(
            "a checkpoint of that name already exists",
            where=str(final),
            fix="Choose another name with --as TAG, or move the existing checkpoint away: it is not overwritten.",
        )
    state, tensors = encode_state(dict(imported.state), "engine")
    folder = begin(final, disk)
    try:
        reports = []
        for index, shard in enumerate(imported.shards):
            extra = [Slice.whole(name, tensor) for name, tensor in tensors.items()] if index == 0 else []
            reports.append(write_rank(folder, index, [*shard, *extra], disk))
        commit(folder, final, reports, imported.step, state, {"model_parts": 1, **imported.world}, disk)
    except BaseException:
        disk.remove_folder(folder)
        raise
    return final


# --- DeepSpeed's state in an engine's form --------------------------------------------------------

OWN_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "num_experts", "universal_checkpoint_info", "autoep_layers",
    "ds_autoep_layers", "folding",
))  # fmt: skip
"""Keys that DeepSpeed writes into a file of model states; all others are the client's."""

MOST_VALUES = 100_000
DEEPEST = 100

_SAME_STATE = frozenset((
    "params", "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused",
    "amsgrad", "decoupled_weight_decay", "bias_correction", "initial_lr", "step", "name",
))  # fmt: skip
"""Keys of a group that do not affect which state the optimizer has; an engine compares the others
with its own optimizer's."""

_NUMPY = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q",
    "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip


class NotPlain(Exception):
    """A value that our checkpoints cannot store; the message is its path and type."""


def plain(value: Any, place: str = "", budget: list[int] | None = None, depth: int = 0) -> Any:
    """Return ``value`` with tensors read. Raises NotPlain for values that require pickle."""
    budget = [MOST_VALUES] if budget is None else budget
    budget[0] -= 1
    if budget[0] < 0:
        raise NotPlain(f"{place}: more than {MOST_VALUES} values")
    if depth > DEEPEST:  # structures can be recursive
        raise NotPlain(f"{place[:100]}: nested more than {DEEPEST} deep")
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, UnknownObject) and value.path.endswith("multiarray.scalar"):
        return _numpy_number(value, place)
    if isinstance(value, dict):
        pairs = [
            (plain(key, place, budget), plain(item, f"{place}.{key}", budget, depth + 1)) for key, item in value.items()
        ]
        return dict(pairs)
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        return type(value)(plain(item, f"{place}[{index}]", budget, depth + 1) for index, item in enumerate(value))
    raise NotPlain(f"{place}: {value.path if isinstance(value, UnknownObject) else type(value).__name__}")


def _numpy_number(value: UnknownObject, place: str) -> int | float | bool:
    """Convert ``numpy.float64(0.5)`` and other numpy scalars to Python numbers."""
    dtype, data = value.args if len(value.args) == 2 else (None, None)
    code = dtype.args[0] if isinstance(dtype, UnknownObject) and dtype.args else None
    form = _NUMPY.get(code) if isinstance(code, str) else None
    if form is None or not isinstance(data, bytes) or len(data) != struct.calcsize(form):
        raise NotPlain(f"{place}: numpy scalar of {code}")
    (number,) = struct.unpack(f"<{form}", data)
    return number if isinstance(number, bool) else float(number) if form in "efd" else int(number)


def plain_or_none(value: Any, place: str, left_out: list[str]) -> Any:
    """Return ``plain(value)``, or None after adding a line to ``left_out``."""
    try:
        return plain(value, place)
    except NotPlain as fault:
        left_out.append(str(fault)[:200])
        return None


def plain_items(values: Mapping[str, Any], place: str, left_out: list[str]) -> dict[str, Any]:
    """Return ``plain`` of each value; add a line to ``left_out`` for values that cannot be saved.
    ``place``: path of a value; the key replaces ``{}``."""
    found = {}
    for key, value in values.items():
        try:
            found[key] = plain(value, place.format(key))
        except NotPlain as fault:
            left_out.append(str(fault)[:200])
    return found


def client_state(model: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the client's entries in the file, except those that cannot be saved."""
    return plain_items({k: v for k, v in model.items() if k not in OWN_KEYS}, "client state {!r}", left_out)


def counters(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the counters. DeepSpeed does not save micro-batches, so compute them from the steps
    and the configured accumulation."""
    steps, config = _whole(model.get("global_steps")), model.get("ds_config")
    return {
        "global_steps": steps,
        "global_samples": _whole(model.get("global_samples")),
        "micro_steps": steps * _accumulation(config if isinstance(config, dict) else {}, model.get("dp_world_size")),
        "skipped_steps": _whole(model.get("skipped_steps")),
    }


def loss_scaler(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scaler's state, from an object (stages 1 to 3) or numbers (stage 0)."""
    scaler = optimizer.get("loss_scaler")
    numbers = scaler.state if isinstance(scaler, UnknownObject) and isinstance(scaler.state, dict) else dict(optimizer)
    scale = float(_number(numbers.get("cur_scale"), 1.0))
    dynamic = numbers.get("dynamic", numbers.get("dynamic_loss_scale", False)) is True
    if not dynamic:
        return {"kind": "static", "scale": scale}
    return {
        "kind": "dynamic",
        "scale": scale,
        "hysteresis_left": _whole(numbers.get("cur_hysteresis"), 1),
        "iteration": _whole(numbers.get("cur_iter")),
        "last_overflow": _whole(numbers.get("last_overflow_iter"), -1),
    }


def group_settings(groups: Sequence[Mapping[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the optimizer groups' hyperparameters."""
    settings = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
    return [plain_items(own, f"optimizer group {index}, {{}}", left_out) for index, own in enumerate(settings)]


def note_optimizer(
    state: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    scalars: Mapping[str, Mapping[str, float]],
    kinds: Iterable[str],
    left_out: list[str],
    count: int = 0,
) -> None:
    """Record in an engine's ``state`` the optimizer's identity, its groups' hyperparameters and
    scalars, and the kinds of its state. ``count``: the number of groups if ``groups`` is empty."""
    state["groups"] = group_settings(groups, left_out) or [{} for _ in range(count)]
    state["optimizer"] = identity(groups, state["ds_config"])
    state["scalars"] = {key: row for key, row in scalars.items() if row}
    state["kinds"] = sorted(kinds)


def common_step(steps: set[float], where: str) -> dict[str, float]:
    """Return the common step of a group's tensors; {} without steps. Raises CheckpointError if the
    steps differ."""
    if len(steps) > 1:
        raise CheckpointError(
            "tensors of one optimizer group have different step numbers",
            where=where,
            got=", ".join(map(str, sorted(steps)[:4])),
            fix="Import with --no-optimizer.",
        )
    return {"step": steps.pop()} if steps else {}


def optimizer_groups(inner: Any, where: str) -> list[dict[Any, Any]]:
    """Return ``param_groups`` of an optimizer's state dict, each with ``params`` as integers; [] if
    ``inner`` is not such a dict.

    Raises CheckpointError for groups of another structure.
    """
    listed = as_list(inner.get("param_groups", []), f"{where}, param_groups") if isinstance(inner, dict) else []
    found = []
    for index, group in enumerate(listed):
        place = f"{where}, param_groups[{index}]"
        numbers = as_integers(as_dict(group, place).get("params", []), f"{place}, params")
        found.append({**group, "params": numbers})
    return found


def optimizer_state(inner: Any, where: str) -> dict[Any, dict[Any, Any]]:
    """Return ``state`` of an optimizer's state dict: parameter number -> kind -> value. Raises
    CheckpointError for another structure."""
    rows = as_dict(inner.get("state", {}), f"{where}, state") if isinstance(inner, dict) else {}
    return {number: as_dict(row, f"{where}, state[{number!r:.20}]") for number, row in rows.items()}


def identity(groups: Sequence[Mapping[str, Any]], config: Any) -> dict[str, Any] | None:
    """Return the optimizer's identity, which an engine compares when it loads."""
    if not groups:
        return None
    shared = set(groups[0]).intersection(*groups)
    # the Adam family is identified by these two, whatever else is in the client's groups
    settings = ["betas", "eps"] if {"betas", "eps"} <= shared else sorted(shared - _SAME_STATE)
    section = config.get("optimizer") if isinstance(config, dict) else None
    kind = section.get("type") if isinstance(section, dict) else None
    return {"class": str(kind or "optimizer of the client"), "settings": settings}


def one_number(kind: str, value: Any) -> dict[str, float]:
    """Return ``{kind: number}``, or {} if ``value`` is not a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {kind: float(value)}
    return {kind: float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else {}


def _accumulation(config: Mapping[str, Any], ranks: Any) -> int:
    given = config.get("gradient_accumulation_steps")
    if type(given) is int and given > 0:
        return given
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if all(type(number) is int and number > 0 for number in (batch, micro, ranks)):
        return max(1, int(batch) // (int(micro) * int(ranks)))  # type: ignore[arg-type]
    return 1


def _whole(value: Any, default: int = 0) -> int:
    return value if type(value) is int else default


def _number(value: Any, default: float) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else default
