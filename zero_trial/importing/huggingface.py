"""Read a ``checkpoint-N`` of Hugging Face's Trainer that torch alone has trained (one process, DDP,
FSDP with a full state dict).

    model.safetensors, or with an index   weights
    optimizer.pt                          torch's state dict: parameters by number
    scheduler.pt                          torch's state dict
    trainer_state.json                    global_step

The optimizer's numbers follow the model's own order, with weight decay first and without it second.
The files do not have that order; the class that ``config.json`` names has it, built without memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.errors import CheckpointError
from zero_trial.importing import facts
from zero_trial.importing.imported import ImportedState, ImportOptions
from zero_trial.importing.torch_file import FileTensor, TorchFile, as_dict
from zero_trial.importing.zero_shards import one_number

TRAINER_STATE = "trainer_state.json"
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def add_trainer_state(folder: Path, weights: ImportedState, options: ImportOptions) -> ImportedState:
    """Return ``weights`` with what else the Trainer's folder has: optimizer, schedule and step. The
    tag is the name under which a Trainer with an engine looks for it."""
    path = folder / TRAINER_STATE
    try:
        step = int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError("not a Trainer's state", where=str(path), got=str(fault)) from fault
    left_out = list(weights.left_out)
    state = dict(weights.state)
    state["counters"] = {**state["counters"], "global_steps": step, "micro_steps": step}
    if (folder / _SCHEDULER).is_file():
        state["scheduler"] = facts.plain_or_none(TorchFile(folder / _SCHEDULER).content, _SCHEDULER, left_out)
    shapes = {part.name.removeprefix("param/"): part.shape for row in weights.shards for part in row}
    rows = list(weights.shards)
    if (folder / _OPTIMIZER).is_file() and options.with_optimizer:
        names, aliases = _architecture(folder) if options.names is None else (options.names, {})
        state["aliases"] = {**state["aliases"], **{options.own(a): options.own(b) for a, b in aliases.items()}}
        own = [[options.own(name) for name in row] for row in names]
        rows.append(_optimizer(folder / _OPTIMIZER, own, shapes, state, left_out))
    elif not (folder / _OPTIMIZER).is_file():
        left_out.append(f"the optimizer's state: there is no {_OPTIMIZER}")
    return replace(
        weights,
        kind=f"Hugging Face Trainer, {weights.kind}",
        tag=f"global_step{step}",
        shards=rows,
        state=state,
        left_out=left_out,
    )


def _optimizer(
    path: Path,
    names: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    state: dict[str, Any],
    left_out: list[str],
) -> list[Slice]:
    """Note groups and steps in ``state``; return the moments."""
    content, where = as_dict(TorchFile(path).content, str(path)), str(path)
    groups, states = facts.optimizer_groups(content, where), facts.optimizer_state(content, where)
    counts = [len(group["params"]) for group in groups]
    found, scalars, kinds = [], {}, set()
    if [len(row) for row in names] != counts:
        raise CheckpointError(
            "the optimizer has other parameters than the model",
            where=where,
            got=f"groups of {counts}",
            expected=f"groups of {[len(row) for row in names]}, with weight decay and without",
            fix="Give --names FILE, a JSON list of the parameters' names in each group; or --no-optimizer.",
        )
    for index, (group, row) in enumerate(zip(groups, names, strict=True)):
        steps: set[float] = set()
        for number, name in zip(group["params"], row, strict=True):
            for kind, value in states.get(number, {}).items():
                if kind == "step":
                    steps |= set(one_number("step", value).values())
                elif isinstance(value, FileTensor) and value.shape == shapes.get(name):
                    kinds.add(str(kind))
                    found.append(Slice.whole(f"state/{kind}/{name}", value.tensor()))
                else:
                    got = f"shape {value.shape}" if isinstance(value, FileTensor) else type(value).__name__
                    raise CheckpointError(
                        f"{kind} is not that of {name}",
                        where=where,
                        got=got,
                        expected=shapes.get(name, "a parameter of the model"),
                        fix="Give --names FILE, a JSON list of the parameters' names in each group; or --no-optimizer.",
                    )
        if len(steps) > 1:
            raise CheckpointError("tensors of one optimizer group have a step of their own", where=where, got=steps)
        scalars[str(index)] = dict.fromkeys(["step"] * len(steps), next(iter(steps), 0.0))
    state["groups"] = facts.group_settings(groups, left_out)
    state["optimizer"] = facts.identity(groups, {})
    state["scalars"] = {key: row for key, row in scalars.items() if row}
    state["kinds"] = sorted(kinds)
    return found


def _architecture(folder: Path) -> tuple[list[list[str]], dict[str, str]]:
    """Return the parameters' names in each of the Trainer's groups, and other names of tied ones,
    from the class that config.json names. Raises CheckpointError without it."""
    fix = "Give --names FILE, a JSON list of the parameters' names in each group; or --no-optimizer."
    try:
        import transformers
    except ImportError as fault:
        raise CheckpointError(
            "the optimizer knows its parameters by number, and transformers, which knows their order, is not installed",
            where=str(folder / _OPTIMIZER),
            fix=fix,
        ) from fault
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, str((config.architectures or [""])[0]))
        with torch.device("meta"):
            model = kind(config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception as fault:  # of a library's many kinds: a class that is not its own, a damaged file
        raise CheckpointError(
            "the model's class cannot be built to learn its parameters' order",
            where=str(folder / "config.json"),
            got=f"{type(fault).__name__}: {fault}"[:200],
            fix=fix,
        ) from fault
    first: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            aliases[name] = first[id(param)]
    names = [name for name in first.values() if model.get_parameter(name).requires_grad]
    return [[name for name in names if name in decayed], [name for name in names if name not in decayed]], aliases
