"""Weights as safetensors files: read as a model's first values (``initialize(model,
weights="folder")``, see ``read_shard`` in ``sharding/build_groups.py``), written
(``engine.save_16bit_model``), and yielded (``engine.named_full_parameters``)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from zero_trial.checkpoint.format import dtype_name, dtype_of, is_floating, safetensors_header, tensor_bytes
from zero_trial.checkpoint.range_reader import WeightsReader, mismatch
from zero_trial.comm import AxisComm, Mesh, fail_together, raise_together
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.adapters import MergedAdapters
from zero_trial.engine.saving import CheckpointNames
from zero_trial.engine.start_checks import checksum, require_same, tensors_of
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.sharding.grouping import ManualGroup, ManualGroups, parameter_names, saved_buffers
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.meta import initialize_buffers, lacks_values, place_absent
from zero_trial.sharding.module_hooks import ModuleHook
from zero_trial.sharding.param_access import GatheredParameters
from zero_trial.util.files import replacing
from zero_trial.util.text import listed

log = logging.getLogger("zero_trial")

_COMPARED = 1 << 20  # elements per comparison of a tied parameter's two copies in a file


class StoredWeights:
    """The values of a model's parameters and persistent buffers in safetensors files, by the
    model's names.

    Construction only reads the headers. Collective over the world.

    Args:
        source: a file, or a folder with one file or with several and an index.
        prefix: prefix of all of the model's names in the file; if no name in the file has it, of
            all of the file's names in the model. Names in the file without it are not read.

    Raises ConfigError listing every name that is missing, unexpected or of another shape, or whose
    dtype is of a different kind than the model's; CheckpointError for a tied parameter that has
    several names with different values in the file.
    """

    def __init__(
        self,
        model: nn.Module,
        source: str | Path,
        prefix: str,
        mesh: Mesh,
        manual_groups: Sequence[ManualGroup],
        living: LivingDtypes,
    ) -> None:
        if mesh.model_part[1] > 1:
            raise ConfigError(
                "weights= cannot load a model that is parallel itself: only its own code can split the weights",
                where="initialize(weights)",
                got=f"{mesh.model_part[1]} parts",
                fix="Load the parts into the model before initialize().",
            )
        self.source = source
        self._reader = fail_together(mesh.world, lambda: WeightsReader(source), "open weights")
        everything = {name: stored.shape for name, stored in self._reader.tensors.items()}
        in_file = any(name.startswith(prefix) for name in everything)

        def stored_as(name: str) -> str:
            return prefix + name if in_file else name.removeprefix(prefix)

        params, buffers = parameter_names(model), {name: model.get_buffer(name) for name in saved_buffers(model)}
        self._dtypes = {name: living.of_stored(param) for name, (param, _) in params.items()}
        self._dtypes |= {name: living.of_stored(buffer) for name, buffer in buffers.items()}
        rows = {
            name: (list(param.shape), names, dtype_name(self._dtypes[name])) for name, (param, names) in params.items()
        }
        rows |= {name: (list(buffer.shape), (name,), "") for name, buffer in buffers.items()}
        # a copy of another pipeline stage's tensor gets that stage's values
        copies = ManualGroups(manual_groups)
        rows = {name: row for name, row in rows.items() if not copies.is_copy(name)}
        wanted: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}  # of parameters, by the file's names
        repeated: list[tuple[str, str]] = []  # pairs of names in the file for one parameter
        known: set[str] = set()  # names that the file may contain, including every name of a tied tensor
        self._name_of: dict[str, str] = {}
        for theirs in mesh.pipe.gather_json(rows, "weights to read"):
            for name, (shape, names, dtype) in theirs.items():
                stored_names = [stored_as(each) for each in names]
                known.update(stored_names)
                chosen, *others = [each for each in stored_names if each in everything] or stored_names[:1]
                wanted[chosen], self._name_of[name] = tuple(shape), chosen
                if dtype:
                    dtypes[chosen] = dtype
                    repeated += [(chosen, other) for other in others]
        relevant = {name: shape for name, shape in everything.items() if not in_file or name.startswith(prefix)}
        superfluous = relevant.keys() - known
        stored = {name: shape for name, shape in relevant.items() if name in wanted or name in superfluous}
        if (text := mismatch(stored, wanted, "the file")) is not None:
            raise ConfigError(
                text,
                where=f"initialize(weights): {source}",
                fix="Build the model that the weights belong to; weights_prefix= is the prefix of the names in the file or in the model.",
            )
        self._require_kinds(dtypes)
        for name, other in repeated:
            compare = partial(self._require_equal, name, other, dtype_of(dtypes[name]), mesh.world)
            fail_together(mesh.world, compare, "tied weights")

    def _require_kinds(self, dtypes: Mapping[str, str]) -> None:
        """Raise ConfigError if parameters of ``dtypes`` cannot hold the numbers in the file."""
        stored = {name: self._reader.tensors[name].dtype for name in dtypes}
        wrong = [name for name, dtype in dtypes.items() if not _holds(dtype, stored[name])]
        if wrong:
            raise ConfigError(
                "the file's dtypes are of another kind than the model's, and a cast would change what the values mean",
                where=f"initialize(weights): {self.source}",
                got=listed([f"{name}: {stored[name]}" for name in wrong], 8),
                expected=listed([f"{name}: {dtypes[name]}" for name in wrong], 8),
                fix="Save the weights in a floating-point dtype: quantized ones must be dequantized first.",
            )

    def _require_equal(self, name: str, other: str, dtype: torch.dtype, world: AxisComm) -> None:
        """Raise CheckpointError if two tensors in the file differ once converted to the parameter's
        ``dtype``. Each rank compares an equal part."""
        first, second = (self._reader.tensors[each] for each in (name, other))
        if first == second:
            return
        start, stop = (prod(first.shape) * part // world.size for part in (world.index, world.index + 1))
        equal = first.shape == second.shape
        for low in range(start, stop, _COMPARED) if equal else ():
            values = torch.empty(2, min(_COMPARED, stop - low), dtype=dtype)
            for each, out in zip((name, other), values, strict=True):
                self._reader.read_into(each, low, low + len(out), out, dtype)
            equal = equal and torch.equal(*values.view(torch.uint8))
        if not equal:
            raise CheckpointError(
                "the file has different values for two names of a tied parameter",
                where=f"initialize(weights): {self.source}",
                got=f"{name} and {other}",
                fix="Remove the wrong one from the file, or build the model without the tie.",
            )

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See :data:`~zero_trial.sharding.build_groups.FirstValues`."""
        self._reader.read_into(self._name_of[name], start, stop, out, self._dtypes[name])


def _holds(dtype: str, stored: str) -> bool:
    """Return whether a parameter of ``dtype`` accepts ``stored`` numbers: a real parameter accepts
    real numbers, a complex one also complex numbers, and any other one all numbers."""
    if is_floating(dtype):
        return is_floating(stored)
    return not dtype.startswith("complex") or is_floating(stored) or stored.startswith("complex")


def give_values(model: nn.Module, data: AxisComm, device: torch.device, *, by_files: bool) -> None:
    """Prepare a model for an engine if tensors lack values (on the meta device, or freed by an
    engine that no longer exists): values in files (``by_files``) or on ``data``'s first rank stay
    absent until they are read. Modules fill buffers that neither has; such parameters are refused.
    Other tensors keep their values. Collective over ``data``. Raises ConfigError on every rank."""
    named = list(itertools.chain(model.named_parameters(), model.named_buffers()))
    lacking = {name: tensor for name, tensor in named if lacks_values(tensor)}
    in_files = {name for name, _ in model.named_parameters()} | set(saved_buffers(model)) if by_files else set()
    needed = sorted(lacking.keys() - in_files)
    # not the names: models are large, and ranks many
    params = sum(isinstance(lacking[name], nn.Parameter) for name in needed)
    rows = data.gather_json([len(lacking), len(needed), params, checksum(needed)], "tensors without values")
    if not any(count for count, *_ in rows):
        return
    if not by_files:
        require_same(data, {"initialize(model)": tensors_of(named)})
    if rows[0][1] and (any(row[2] for row in rows) or any(row[1:] != rows[0][1:] for row in rows)):
        _refuse_lacking(needed, data)
    given = place_absent(model, device)
    if rows[0][1]:  # else the files or the broadcast of first values cover all
        initialize_buffers(model, needed, data, given)


def _refuse_lacking(needed: Sequence[str], data: AxisComm) -> NoReturn:
    """Raise ConfigError for parameters without values, or if ranks lack different buffers."""
    lists = data.gather_json([len(needed), *needed[:2]], "tensors without values")
    found = (f"rank {rank}: {names[0]} ({', '.join(names[1:])} ...)" for rank, names in enumerate(lists[:4]))
    raise ConfigError(
        "tensors of the model have no values on some ranks",
        where="initialize(model)",
        got="; ".join(found),
        expected="all values on rank 0, or weights= for a model on the meta device",
        fix="Pass weights=, build the model inside zero_trial.zero.Init(), load the whole model on rank 0, or call destroy() of its earlier "
        "engine on every rank.",
    )


# --- writing --------------------------------------------------------------------------------------


class FullTensors:
    """Iterates over the whole model's parameters by name, tied ones once: each has its full value
    on every rank while it is current; groups are gathered one after the other. In a pipeline, each
    stage sends its parameters to the others, which hold one tensor at a time.

    Construction, and each step of an iteration to its end, are collective over the world.

    Args:
        buffers: also yield the buffers that a state dict contains.
        merge_lora: see :class:`MergedAdapters`.

    Attributes:
        facts: each stage's names, in iteration order, with dtypes and shapes.
    """

    def __init__(
        self,
        engine: EngineAccessors,
        where: str,
        *,
        without_frozen: bool = False,
        buffers: bool = False,
        merge_lora: bool = False,
    ) -> None:
        names = CheckpointNames(engine)
        _require_one_part(names, where)
        engine.sharded.require_values()
        self._adapters = MergedAdapters(engine.module, where) if merge_lora else None
        self._mesh, self._device = engine.mesh, engine.device
        named = {
            id(param): name
            for name, (param, _) in parameter_names(engine.module).items()
            if (param.requires_grad or not without_frozen) and not engine.sharded.manual_groups.is_copy(name)
        }
        groups = [[param for param in group.params if id(param) in named] for group in engine.sharded.groups]
        inside = {id(param) for group in groups for param in group}
        others = [[param] for param in engine.module.parameters() if id(param) in named and id(param) not in inside]
        self._chunks: list[list[tuple[str, torch.Tensor]]] = [
            [(plain, param) for param in chunk if (plain := self._plain_name(named[id(param)])) is not None]
            for chunk in (*groups, *others)
        ]
        if buffers:
            self._chunks += [[row] for row in names.buffers() if not engine.sharded.manual_groups.is_copy(row[0])]
        own = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for chunk in self._chunks for name, tensor in chunk]
        self.facts = self._mesh.pipe.gather_json(own, where)

    def _plain_name(self, name: str) -> str | None:
        return name if self._adapters is None else self._adapters.name(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pipe = self._mesh.pipe
        for stage, facts in enumerate(self.facts):
            for name, value in self._own() if stage == pipe.index else self._received(facts):
                sent = value.contiguous() if pipe.size > 1 else value
                pipe.broadcast(sent, name, stage)
                yield name, sent

    def handed_out(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same, in ``dtype`` if given, to a loop that may end early on one rank."""
        left = iter(self)
        try:
            for name, tensor in left:
                yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        except GeneratorExit:
            for _ in left:  # the other ranks continue, and need this rank in their gathers
                pass
            raise

    def _received(self, facts: Sequence[tuple[str, str, Sequence[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in facts:
            yield name, torch.empty(shape, dtype=dtype_of(dtype), device=self._device)

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        for chunk in self._chunks:
            params: list[Any] = [tensor for _, tensor in chunk]
            more = [each for param in params for each in self._adapters.needs(param)] if self._adapters else []
            with GatheredParameters([*params, *more]):
                for name, tensor in chunk:
                    yield name, self._adapters.value(tensor) if self._adapters is not None else tensor.detach()


def save_weights(engine: EngineAccessors, directory: Path, filename: str, *, without_frozen: bool = False) -> bool:
    """Write the whole model as one safetensors file in the parameters' dtype; tied names are stored
    once and listed in the metadata.

    Collective over the world. One group at a time is gathered, and no rank has the whole model,
    unless modules build their state dict themselves.
    """
    names = CheckpointNames(engine)
    aliases = names.aliases()
    metadata = {"format": "pt", **{f"alias:{alias}": name for alias, name in aliases.items()}}
    if all(engine.mesh.pipe.gather_json(_has_plain_state(engine.module), "state dicts")):
        tensors = FullTensors(engine, "engine.save_16bit_model", without_frozen=without_frozen, buffers=True)
        fault = _stream_weights(tensors, directory / filename, metadata, writes=engine.mesh.rank == 0)
    else:
        state = first_rank_state(engine, "engine.save_16bit_model", without_frozen)
        fault = None
        if state is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                kept = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
                with replacing(directory / filename) as part:
                    save_file(kept, part, metadata=metadata)
            except (OSError, SafetensorError) as error:
                fault = error
    text = f"save_16bit_model: {directory / filename} was not written: {fault}" if fault is not None else None
    raise_together(engine.mesh.world, text, "save_16bit_model")
    return True


def _has_plain_state(module: nn.Module) -> bool:
    """Return whether the state dict contains only parameters and saved buffers, by name."""
    own = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return all(
        all(getattr(type(part), name) is getattr(nn.Module, name) and name not in vars(part) for name in own)
        and all(isinstance(hook, ModuleHook) for hook in part._state_dict_hooks.values())
        and all(isinstance(hook, ModuleHook) for hook in part._state_dict_pre_hooks.values())
        for part in module.modules()
    )


def _stream_weights(tensors: FullTensors, path: Path, metadata: Mapping[str, str], *, writes: bool) -> Exception | None:
    """Write the file on rank 0 (``writes``), tensor by tensor, and return the reason if that fails;
    the other ranks take part in the gathers. Collective over the world."""
    facts = {name: (dtype_of(dtype), shape) for stage in tensors.facts for name, dtype, shape in stage}
    # wide dtypes first, so that each tensor is aligned in the file
    order = sorted(facts, key=lambda name: (-facts[name][0].itemsize, name))
    header = safetensors_header(((name, *facts[name]) for name in order), metadata)
    places, end = {}, len(header)
    for name in order:
        places[name], end = end, end + prod(facts[name][1]) * facts[name][0].itemsize
    fault: Exception | None = None
    with ExitStack() as stack:
        file: Any = None
        if writes:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(stack.enter_context(replacing(path)).open("r+b"))
                file.write(header)
            except OSError as error:
                fault = error
        for name, tensor in tensors:
            if file is None or fault is not None:
                continue
            try:
                file.seek(places[name])
                file.write(tensor_bytes(tensor.detach().to("cpu").contiguous()))
            except OSError as error:
                fault = error
        try:
            if fault is not None:
                stack.pop_all().__exit__(type(fault), fault, fault.__traceback__)
            stack.close()
        except OSError as error:
            fault = error
    return fault


def module_state(engine: EngineAccessors, *, without_frozen: bool, rank0_only: bool) -> dict[str, torch.Tensor]:
    """Return the state dict of the module; with ``rank0_only`` like
    :meth:`FullParams.rank0_state_dict`. Collective over shard."""
    state = engine.sharded.full_params.rank0_state_dict() if rank0_only else engine.module.state_dict()
    if not without_frozen:
        return state
    params = engine.module.named_parameters(remove_duplicate=False)
    frozen = {name for name, param in params if not param.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def first_rank_state(engine: EngineAccessors, where: str, without_frozen: bool) -> dict[str, torch.Tensor] | None:
    """Return the state dict of the whole model on rank 0, None on the others: copies in host
    memory, in the parameters' dtype; tied names share one copy. Collective over the world."""
    names = CheckpointNames(engine)
    _require_one_part(names, where)
    # streamed: no device and no other rank holds the whole model
    state = _whole_model(engine, module_state(engine, without_frozen=without_frozen, rank0_only=True))
    aliases = names.aliases()
    if engine.mesh.rank != 0:
        return None
    return {name: state[aliases.get(name, name)] for name in state}


def _require_one_part(names: CheckpointNames, where: str) -> None:
    if names.parts > 1:
        raise TrialError(
            "no rank has the whole model: the model is parallel itself",
            where=where,
            got=f"{names.parts} parts",
            fix="Use engine.save_checkpoint, or join the parts of engine.module_state_dict() in the way that the model splits them.",
        )


def _whole_model(engine: EngineAccessors, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the state dicts of all pipeline stages on the first stage; a tied weight is the same in
    all of them. Collective over pipe.

    One tensor is sent at a time. If the pipe's backend does not support host tensors (NCCL only),
    it is copied to the device first.
    """
    pipe = engine.mesh.pipe
    if pipe.size == 1:
        return own
    whole = dict(own)
    facts = {name: [dtype_name(value.dtype), list(value.shape), value.is_cpu] for name, value in own.items()}
    for stage, theirs in enumerate(pipe.gather_json(facts, "parts of the model")):
        for name, (dtype, shape, on_host) in theirs.items():
            device = torch.device("cpu") if on_host and pipe.takes_host_tensors else engine.device
            mine = stage == pipe.index
            value = (
                own[name].to(device).contiguous() if mine else torch.empty(shape, dtype=dtype_of(dtype), device=device)
            )
            pipe.broadcast(value, name, stage)
            if pipe.index == 0:
                whole[name] = value.cpu()
    return whole
