"""The full parameters of one model for user code: gathered by GatheredParameters, state_dict() and
load_state_dict(), and freed again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.sharding.guards.freed import FreedParameter, lost_edits, one_memory, set_data
from zero_trial.sharding.guards.grad_access import ParamGrads
from zero_trial.sharding.module_hooks import ModuleHook
from zero_trial.sharding.offload.moved_states import MovedStates
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.unshard import Unsharder


class TrainedParams(Protocol):
    """The part of a sharded model that the safe_get_* functions use."""

    param_grads: ParamGrads
    unsharder: Unsharder

    def take_live_edits(self, only: ParamGroup | None = None) -> None: ...

    def group_of(self, param: torch.Tensor) -> tuple[ParamGroup, int]: ...


class _Seen(NamedTuple):
    """A parameter that was unsharded when a block of user code was entered.

    Args:
        memory: its values.
        before: a copy of them; None in a block that only reads.
        version: of the parameter.
        writes: of its group, see :attr:`EditWatch.writes`.
    """

    param: nn.Parameter
    group: ParamGroup | None
    memory: torch.Tensor
    before: torch.Tensor | None
    version: int
    writes: int

    def current(self) -> bool:
        """Return whether the engine has not written other values since."""
        return self.group is None or (self.group.live and self.group.edits.writes == self.writes)

    def edited(self) -> bool:
        same = self.param._version == self.version and self.param.data_ptr() == self.memory.data_ptr()
        return self.current() and not same

    def take_back(self) -> None:
        if self.before is not None and self.current():
            set_data(self.param, self.memory)
            self.memory.copy_(self.before)


class _Block(NamedTuple):
    """A GatheredParameters block: its parameters, the groups that it has gathered, those that user
    code had not edited before, and the parameters that were unsharded."""

    params: list[nn.Parameter]
    gathered: list[ParamGroup]
    clean: list[ParamGroup]
    seen: list[_Seen]


class FullParams:
    """Gathers the full parameters of one model for user code, and writes edits back. Collective
    over shard: every rank must request the same parameters.

    state_dict: torch calls the hooks of every module inside the requested module, outermost first.
    Each module's own parameters are gathered when its hook runs and freed when the hook of another
    group runs, so that the device holds one group at a time and never the whole model. If
    parameters are freed, ``state_dict`` returns copies in host memory, on every rank of the axis;
    after :meth:`list_names` it does not communicate.
    """

    def __init__(
        self,
        model: TrainedParams,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        comm: AxisComm,
        moved: MovedStates,
        unsharder: Unsharder,
    ) -> None:
        self.model = ref(model)
        self._unsharder = unsharder
        self.module = module
        self._groups = groups
        self.comm = comm
        self._moved = moved
        self._blocks: list[_Block] = []  # for each open() without its close(), newest last
        self._scope: nn.Module | None = None  # the module whose state dict was requested
        self._loading = False
        self._gathered: list[ParamGroup] = []  # for the state dict
        # Modules whose own entries are still views: torch copies nothing, and calls the hooks of a
        # module's children before its own.
        self._uncopied: list[tuple[nn.Module, list[ParamGroup]]] = []
        self._drops_values = False
        self._lists_names: Any = None  # while set, see list_names(): the handle of the hook that ends it
        self._copies = any(group.plan.params is not Lifetime.ALWAYS for group in groups)
        self._to_host = self._copies  # state_dict() returns copies in host memory
        self._copied: dict[int, torch.Tensor] = {}  # by parameter: tied names share one
        self.handles: list[Any] = []
        self._places = {id(param): (group, index) for group in groups for index, param in enumerate(group.params)}
        for part in module.modules():
            if inside := self._holding(part.parameters()):
                self._install(part, inside, self._holding(part.parameters(recurse=False)))

    def _install(self, part: nn.Module, inside: list[ParamGroup], own: list[ParamGroup]) -> None:
        def before(loading: bool) -> ModuleHook:
            return ModuleHook(lambda module, *_: self._enter(module, own, loading=loading))

        self.handles += [
            part.register_state_dict_pre_hook(before(loading=False)),
            part.register_load_state_dict_pre_hook(before(loading=True)),
            part._register_state_dict_hook(ModuleHook(self._after_state_dict)),
            part.register_load_state_dict_post_hook(ModuleHook(lambda module, _: self._after_load(module, inside))),
        ]

    def remove_hooks(self) -> None:
        self.end_names()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # --- GatheredParameters -----------------------------------------------------------------------

    def open(self, params: list[nn.Parameter], *, reads: bool) -> None:
        """See :class:`ShardOwner`. May be nested."""
        self._moved.require_here("GatheredParameters", ("lp_params",))
        self.end_names()
        held = self._holding(params)
        seen = self._see(params, reads=reads)
        clean = [group for group in held if not group.edits.edited(whole=False)]
        gathered = [group for group in held if not group.live]
        for group in gathered:
            group.unshard_async()
        for group in gathered:
            group.finish_unshard()
        self._unsharder.pin(held)
        self._blocks.append(_Block(params, gathered, clean, seen))

    def _see(self, params: list[nn.Parameter], *, reads: bool) -> list[_Seen]:
        if not all(group.real for group in self._groups):
            return []
        found = []
        for param in params:
            group, _ = self._places.get(id(param), (None, 0))
            if group is None or group.live:
                memory = param.detach()
                before, writes = None if reads else memory.clone(), 0 if group is None else group.edits.writes
                found.append(_Seen(param, group, memory, before, param._version, writes))
        return found

    @torch.no_grad()
    def close(self, params: list[nn.Parameter], source: int | None, *, undo: bool = False) -> None:
        """See :class:`ShardOwner`. Raises TrialError if the optimizer freed edited values."""
        # a generator's block may end after one that was entered inside it
        places = (at for at in reversed(range(len(self._blocks))) if self._blocks[at].params is params)
        block, held = self._blocks.pop(next(places)), self._holding(params)
        self._unsharder.unpin(held)
        edited: list[str] = []
        if undo:
            for each in block.seen:
                each.take_back()
        elif source is None:
            changed = {id(each.param) for each in block.seen if each.edited()}
            if changed:
                edited = [name for name, param in self.module.named_parameters() if id(param) in changed]
                edited = edited or ["a parameter that has left the module"]  # as PEFT's merge removes some
        else:
            self._send_edits(params, held, source)
        for group in block.gathered:
            if source is None and not undo and group.live:
                edited += group.edits.names(whole=True)
            self._unsharder.free(group)
        for group in block.clean if undo else ():
            group.edits.accept(undone=True)
        if edited and (edited := [name for name in edited if not self._unmerged(name)]):
            raise lost_edits(edited, "inside GatheredParameters(params), which only reads (modifier_rank=None)")

    def _unmerged(self, name: str) -> bool:
        """Return whether ``name`` is a weight under PEFT's adapters that are not merged. Then its
        edit was a merge and an unmerge, as in TRL's export to an inference server, and dropping the
        edit loses nothing but rounding."""
        layer = self.module.get_submodule(name.rpartition(".base_layer.")[0]) if ".base_layer." in name else None
        return getattr(layer, "merged", True) is False

    def _send_edits(self, params: list[nn.Parameter], held: list[ParamGroup], source: int) -> None:
        take_replaced(held)
        for group in held:
            if not group.live:
                raise TrialError(
                    "the optimizer stepped inside a block that edits parameters",
                    where=f"GatheredParameters(modifier_rank={source})",
                    fix="Exit the block before engine.step().",
                )
            self.comm.broadcast(group.full, f"edited {group.name}", source)
            group.apply_edits()
        for param in (each for each in params if id(each) not in self._places):
            self.comm.broadcast(param.data, "edited parameter", source)

    def _holding(self, params: Iterable[nn.Parameter]) -> list[ParamGroup]:
        """List the groups that hold any of ``params``, in the order of all ranks."""
        wanted = {id(self._places[id(param)][0]) for param in params if id(param) in self._places}
        return [group for group in self._groups if id(group) in wanted]

    def name_of(self, param: nn.Parameter) -> str | None:
        """See :class:`ShardOwner`."""
        group, index = self._places.get(id(param), (None, 0))
        return group.layout.slots[index].name if group is not None else None

    def part_of(self, param: nn.Parameter) -> torch.Tensor:
        """See :class:`ShardOwner`."""
        group, index = self._places[id(param)]
        with group.materialized():
            return local_part(group, index, group.shard).detach()

    def copied(self, param: nn.Parameter) -> None:
        """See :class:`ShardOwner`."""

    # --- state_dict, load_state_dict --------------------------------------------------------------

    def rank0_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` of the module, copied to host memory, only on the first rank of
        the shard axis; the other ranks get an empty one.

        The ranks of a host then hold one copy of the model instead of one each.
        """
        self.end_names()
        first = all(group.comm.index == 0 for group in self._groups)
        self._drops_values, self._to_host = not first, True
        try:
            state: dict[str, Any] = self.module.state_dict()
        finally:
            self._drops_values, self._to_host = False, self._copies
        return state if first else {}

    def list_names(self) -> None:
        """Make ``state_dict()`` of the module and its parts local, with freed parameters as values,
        until all ranks use the model again: in a forward, a step, GatheredParameters, a checkpoint.

        Called after :meth:`rank0_state_dict`. Libraries then save only on rank 0 and read names of
        parts there (PEFT's ``modules_to_save``), or have nothing to save on the other ranks and
        request a state dict that they do not read (``save_pretrained(state_dict=None,
        is_main_process=False)``). Gathering there would wait for ranks that never call it.
        """
        if self._copies and self._lists_names is None:
            self._lists_names = self.module.register_forward_pre_hook(ModuleHook(lambda *_: self.end_names()))

    def end_names(self) -> None:
        """Make ``state_dict()`` gather again. Local."""
        if self._lists_names is not None:
            self._lists_names.remove()
            self._lists_names = None

    def _enter(self, part: nn.Module, own: list[ParamGroup], *, loading: bool) -> None:
        """Gather the groups of the part's own parameters, instead of those of the part before."""
        if loading:
            self.end_names()
        if self._scope is None or part is self._scope or all(part is not inner for inner in self._scope.modules()):
            self._loading = False  # drop state that an earlier failed call left open
            self._uncopied.clear()
            self._copied.clear()
            self._free_gathered(())
            self._scope, self._loading = part, loading
        self._free_gathered(own)
        if not loading:
            self._uncopied.append((part, own))
        freed = [group for group in own if not group.live and self._lists_names is None]
        for group in freed:
            group.unshard_async()
        for group in freed:
            group.finish_unshard()
        self._gathered += freed

    def _after_state_dict(self, part: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Replace the part's own entries, views of buffers that will be freed, with copies. Entries
        of inner modules are already copied."""
        if self._to_host:
            for name, own in (*part._parameters.items(), *part._buffers.items()):
                value = state.get(prefix + name)
                if torch.is_tensor(value) and not isinstance(value, FreedParameter):
                    if not self._drops_values and id(own) not in self._copied:
                        self._copied[id(own)] = value.to("cpu", copy=True)
                    state[prefix + name] = self._copied.get(id(own))
        while self._uncopied and self._uncopied.pop()[0] is not part:
            pass
        if part is self._scope:
            self._free_gathered(())
            self._scope = None
            self._copied.clear()

    def _after_load(self, part: nn.Module, inside: list[ParamGroup]) -> None:
        if part is self._scope:
            loaded = _ids(part)
            for block in self._blocks:  # loaded values are equal on all ranks
                block.seen[:] = [each for each in block.seen if each.group is not None or id(each.param) not in loaded]
            for group in inside:
                if group.live and group not in self._gathered:
                    group.load_full(loaded)
            self._free_gathered(())
            self._scope, self._loading = None, False

    def _free_gathered(self, keep: Collection[ParamGroup]) -> None:
        """Free the groups that were gathered here, except ``keep`` and those whose entries are not
        copied yet.

        Values that were loaded into them are first copied to the shards.
        """
        keep = [*keep, *(group for _, groups in self._uncopied for group in groups)]
        loaded = _ids(self._scope) if self._loading and self._scope is not None else None
        for group in [group for group in self._gathered if group not in keep]:
            if loaded is not None and group.live:
                group.load_full(loaded)
            self._unsharder.free(group)
            self._gathered.remove(group)


def take_replaced(groups: Sequence[ParamGroup]) -> None:
    """Apply values that user code has assigned (``param.data = new``). Two parameters may have been
    swapped. Local; cost: a check of each parameter's address.

    Raises TrialError for another shape, dtype or device, and if two parameters share memory.
    """
    found = [(group, index) for group in groups if group.live for index in group.edits.note_replaced()]
    if not found:
        return
    known: dict[int, str] = {}
    for slot, param in (pair for group in groups for pair in zip(group.layout.slots, group.params, strict=True)):
        if slot.numel and (other := known.setdefault(param.data_ptr(), slot.name)) != slot.name:
            raise one_memory(slot.name, other)
    copies = [group.params[index].detach().clone() for group, index in found]
    for (group, index), values in zip(found, copies, strict=True):
        view = group.attached.views[index]
        if (values.shape, values.dtype, values.device) != (view.shape, view.dtype, view.device):
            raise TrialError(
                "the values of a parameter were replaced by a tensor of another shape, dtype or device",
                where=group.layout.slots[index].name,
                got=f"{tuple(values.shape)}, {values.dtype}, {values.device}",
                expected=f"{tuple(view.shape)}, {view.dtype}, {view.device}",
                fix="Call model.to(), .half() and the like before initialize(), and set the precision in ds_config (bf16, fp16).",
            )
        group.wait_before_writing()
        view.copy_(values)
        group.params[index].data = view


def _ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def local_part(group: ParamGroup, index: int, shard: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements of slot ``index`` in ``shard``."""
    slot = group.layout.slots[index]
    parts = [shard[p.offset : p.offset + p.numel] for p in group.layout.pieces(group.comm.index) if p.slot is slot]
    return torch.cat(parts) if parts else shard.new_empty(0)


class ParameterOffload:
    """DeepSpeed's owner of the hooks that gather and free parameters at stage 3, for libraries
    (TRL) that remove its hooks while all parameters are gathered, to generate, and restore them.

    Here hooks ignore parameters that ``GatheredParameters`` has gathered, and do not communicate
    for them. So this class lists no hooks, and nothing needs to be restored.
    """

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> ParameterOffload:
        """The module with the parameters whose uses DeepSpeed counts: here none are counted."""
        return self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing: no hooks were removed."""
