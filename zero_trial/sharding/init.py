"""``zero.Init``: builds a model that no rank ever holds as a whole.

A parameter is cut into shards as soon as the module that owns it is assigned to its parent: at that
moment the module's own initialization is done. Code that touches such a parameter later in the same
block (``self.apply(init_weights)``, ``nn.init.normal_(self.head.weight)``) works: the parameter is
gathered for it and cut again afterwards, at most OPEN of them whole at a time. Random numbers are
drawn as without Init, so the model is the same, bit for bit (with a 16-bit dtype, rounded at the
end of the block).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from zero_trial.comm import AxisComm, Mesh, MeshShape, build_mesh, expects_ranks, init_distributed, world_size
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.guards.freed import (
    METADATA,
    absent,
    free,
    lost_edits,
    mark_sharded,
    own_params,
    owner_of_param,
    plain_class,
    revive,
    twin_of,
)
from zero_trial.sharding.layout import ALIGN, round_up
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.precision import DtypePolicy, dtype_from_name
from zero_trial.sharding.quantized import is_opaque, scales_of

OPEN = 4


class PreSharded:
    """One parameter's shard on this rank: ``ceil(numel / N)`` elements, padded to ALIGN; the
    parameter itself keeps only its shape.

    Cutting is collective over ``comm``: all ranks get rank 0's values.
    """

    module = None

    def __init__(self, param: nn.Parameter, comm: AxisComm) -> None:
        self._param = param
        self.comm = comm
        self._part: torch.Tensor | None = None
        self.rounded = False  # the values have lost bits in cast()
        self._allocate(param)
        # the parameter's version and address when each block of user code was entered
        self._opened: list[tuple[int, int]] = []
        self.live = True
        self.cut()

    def _allocate(self, values: torch.Tensor) -> None:
        self._shape, self._numel = values.shape, values.numel()
        self._padded = round_up(max(self._numel, 1), ALIGN * self.comm.size)
        self._part = torch.zeros(self._padded // self.comm.size, dtype=values.dtype, device=values.device)

    @property
    def part(self) -> torch.Tensor:
        """The shard. Raises TrialError after :meth:`spend`."""
        if self._part is None:
            raise TrialError(
                "the parameter's values were passed to an engine whose build failed",
                where="initialize(model)",
                got=f"a parameter of shape {tuple(self._param.shape)} without values",
                fix="Build the model again inside zero_trial.zero.Init(), or pass weights=.",
            )
        return self._part

    def spend(self) -> None:
        """Free the shard: an engine has taken over its values."""
        self._part = None

    def cast(self, dtype: torch.dtype) -> None:
        """Round the values of a floating-point parameter, which is freed, to ``dtype``. Local."""
        if self.part.is_floating_point() and self.part.dtype != dtype and not is_opaque(self._param):
            self.rounded = self.rounded or torch.promote_types(self.part.dtype, dtype) != dtype
            self._part = self.part.to(dtype)
            self._leave()

    def cut(self) -> None:
        """Keep this rank's part of the parameter's current value and free the rest. Does nothing
        while GatheredParameters holds the parameter. Collective, if the value is in memory."""
        if not self.live or self._opened:
            return
        values = self._param.detach().contiguous()
        self.comm.broadcast(values, "first values")
        self._keep_part(values)
        self._leave()

    def _keep_part(self, values: torch.Tensor) -> None:
        """Keep this rank's part of ``values``, which are equal on all ranks. Their shape and dtype
        become the parameter's. Collective."""
        if (values.shape, values.dtype) != (self._shape, self.part.dtype):
            self._allocate(values)
        low = self.comm.index * self.part.numel()
        own = values.view(-1)[low : low + self.part.numel()]
        self.part[: own.numel()].copy_(own)

    def gather(self) -> torch.Tensor:
        """Return the full value as a new tensor. Collective."""
        full = torch.empty(self._padded, dtype=self.part.dtype, device=self.part.device)
        self.comm.all_gather(full, self.part, "built parameter").wait()
        return full[: self._numel].view(self._shape)

    def lift(self) -> None:
        """Give the parameter its full value until the next :meth:`cut`. Collective."""
        if not self.live:
            revive(self._param, self.gather())
            self._param.__class__ = plain_class(type(self._param))  # nn.Parameter(param), as weight_norm calls it
            self.live = True

    def _leave(self) -> None:
        free(self._param, absent(self._shape, self.part.dtype, self.part.device))
        self.live = False

    # ShardOwner, so that GatheredParameters works before there is an engine

    def name_of(self, param: nn.Parameter) -> str | None:
        return None

    def part_of(self, param: nn.Parameter) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            low = min(self.comm.index * self.part.numel(), self._numel)
            return self.part[: min(self.part.numel(), self._numel - low)].clone()

    def copied(self, param: nn.Parameter) -> nn.Parameter | None:
        twin = twin_of(param, absent(param.shape, self.part.dtype, self.part.device))
        own = copy.copy(self)
        own._param, own._part, own._opened = twin, self.part.clone(), []
        own_params([twin], own)
        return twin

    def open(self, params: list[nn.Parameter], *, reads: bool) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # values written until now are kept, even if the following edits fail
            self.cut()
            self.lift()
            if reads and not self._opened:
                mark_sharded([self._param])  # edits of its .data have a version
        self._opened.append(self._stamp())

    def close(self, params: list[nn.Parameter], source: int | None, *, undo: bool = False) -> None:
        stamp = self._opened.pop()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if source is not None:
                values = self._param.detach().contiguous()
                self.comm.broadcast(values, "edited parameter", source)
                self._keep_part(values)
                revive(self._param, values)
                self._opened = [self._stamp() for _ in self._opened]
            edited = source is None and self._stamp() != stamp
            if not self._opened:
                self._leave()
            if edited and not undo:
                raise lost_edits(
                    [f"a parameter of shape {tuple(self._shape)}"],
                    "inside GatheredParameters(params), which only reads (modifier_rank=None)",
                )

    def _stamp(self) -> tuple[int, int]:
        return self._param._version, self._param.data_ptr()


def read_first_values(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's full first value, gathered (collective) if it was cut."""
    sharded = owner_of_param(param)
    if isinstance(sharded, PreSharded):
        return param.detach() if sharded.live else sharded.gather()
    return param.detach()


class Init:
    """Shard a model while it is built: a context manager around its construction. A no-op if
    ``enabled`` is false.

    Collective over the data-parallel ranks: all of them must build the same model.

    Args:
        module: a module that is already built, to shard at once (without a ``with`` block).
        data_parallel_group: None or the group of all ranks; other groups are an error, and so is an
            ``mpu`` of a model that is itself parallel. ``sequence_data_parallel_group`` means the
            same.
        dtype: the dtype of floating-point parameters after the block. Values are rounded then, as
            by ``model.to(dtype)`` after a construction without Init, and fp32 masters start from
            the rounded values. None: bf16 or fp16 if the ds_config enables one of them, otherwise
            unchanged. Modules that the ds_config or the model keeps in fp32 are not rounded
            (``data_types.keep_in_fp32_modules``; dotted names begin at the block's outermost
            modules).
        mesh: the mesh whose shard axis shards the parameters (default: all ranks).
        config_dict_or_path: a ds_config, validated as strictly as by ``initialize``, except that
            "auto" values may be unresolved. It has no other effect: ``initialize`` sets precision
            and offload.
        config: the same.
        mem_efficient_linear: accepted without effect, as are ``pin_memory`` and
            ``tensor_overrides``: tensors that are not parameters stay as they are built.
        remote_device: an error if it requests anything unsupported, as are
            ``zero_param_parallel_group``, ``zero_quantized_weights``, ``param_swapper`` and others.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | DsConfig | None = None,
        config: Mapping[str, Any] | str | Path | DsConfig | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        mesh: Mesh | None = None,
    ) -> None:
        asked = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper,
            "remote_device": remote_device not in ("none", "cuda", "cpu") and remote_device,
        }
        for name, value in asked.items():
            if value:
                what, where = "this is not possible while a model is being built", f"zero.Init({name})"
                raise ConfigError(what, where=where, got=value, fix=_OTHERWISE[name])
        self._fp32_modules: tuple[str, ...] = ()
        for source in (config_dict_or_path, config):
            if source is not None:  # raises for what initialize() would refuse
                read = source if isinstance(source, DsConfig) else read_ds_config(source, allow_open=True)
                self._fp32_modules = read.data_types.keep_in_fp32_modules
                if dtype is None and read.precision != "fp32":
                    dtype = dtype_from_name(read.precision, "precision")
        self._group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        self._mpu = mpu
        self._dtype = dtype
        self._mesh = mesh
        self._enabled = enabled
        self._block = ExitStack()
        self._mode = _Lifting()
        self._made: list[PreSharded] = []
        self._on_meta: list[nn.Parameter] = []
        self._modules: dict[int, nn.Module] = {}
        # built, but their module is not in its parent yet
        self._pending: dict[int, nn.Parameter] = {}
        if module is not None and enabled:
            with self:
                self._modules[id(module)] = module
                for param in module.parameters():
                    self._cut(param)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if self._mesh is None:
            if expects_ranks():
                init_distributed()
            _require_all_ranks(self._group, self._mpu)
            self._mesh = build_mesh(MeshShape(shard=world_size()))
        self._block.enter_context(self._mode)
        self._block.callback(register_module_parameter_registration_hook(self._on_parameter).remove)
        self._block.callback(register_module_module_registration_hook(self._on_module).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._mode.close_all()
        self._block.close()
        if kind is None:
            for param in list(self._pending.values()):
                self._cut(param)
            self._pending.clear()
            if self._dtype is not None:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self._give_dtype(self._dtype)
        for found in (self._made, self._on_meta, self._modules):
            found.clear()

    def _give_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of all parameters except those of modules that stay fp32."""
        policy = DtypePolicy(dtype, dtype, dtype, fp32_modules=self._fp32_modules)
        inside = {id(child) for module in self._modules.values() for child in module.children()}
        roots = [module for number, module in self._modules.items() if number not in inside]
        kept: dict[int, torch.dtype] = {}
        for root in roots:
            living = LivingDtypes(root, policy)
            kept |= {id(param): living.of(param) for param in root.parameters() if living.keeps(param)}
        for sharded in self._made:
            sharded.cast(kept.get(id(sharded._param), dtype))
        for param in self._on_meta:
            param.data = param.data.to(kept.get(id(param), dtype))

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        self._modules[id(module)] = module
        if param is None or owner_of_param(param) is not None:
            return
        before = module._parameters.get(name)
        if before is None or not before.is_meta or param.is_meta:
            self._pending[id(param)] = param
            return
        # a loader fills a module that was built without values; they may be quantized
        self._pending.pop(id(before), None)
        for each in (param, *scales_of(param).values()):
            self._cut(each)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._modules[id(parent)] = parent
        if child is None:
            return
        with torch._C.DisableTorchFunction():
            for param in child.parameters():
                if self._pending.pop(id(param), None) is not None:
                    self._cut(param)

    def _cut(self, param: nn.Parameter) -> None:
        if self._mesh is None or owner_of_param(param) is not None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if param.is_meta:  # it gets its values at initialize
                if param.is_floating_point():
                    self._on_meta.append(param)
                return
            sharded = PreSharded(param, self._mesh.shard)
        own_params([param], sharded)
        self._made.append(sharded)


_OTHERWISE = {
    "zero_param_parallel_group": "Set mesh.shard in ds_config: parameters are then sharded over fewer ranks (hybrid sharding).",
    "zero_quantized_weights": "Remove it: parameters are gathered in their own dtype.",
    "zero_quantized_nontrainable_weights": "Remove it: frozen parameters are sharded like all others.",
    "param_swapper": "Remove it; zero_optimization.offload_param in initialize()'s ds_config moves parameters to NVMe.",
    "remote_device": "Remove it: shards are in memory until the engine is built; zero_optimization.offload_param then moves them to NVMe, one "
    "group after the other.",
}


def _require_all_ranks(group: Any, mpu: Any) -> None:
    """Raise ConfigError if parameters would not be cut over all ranks."""
    parts = mpu.get_model_parallel_world_size() if hasattr(mpu, "get_model_parallel_world_size") else 1
    ranks = world_size(group)
    if parts > 1 or ranks != world_size():
        raise ConfigError(
            "parameters are sharded over all ranks, which must build the same model",
            where="zero.Init(mpu)" if parts > 1 else "zero.Init(data_parallel_group)",
            got=f"{parts} parallel parts of the model" if parts > 1 else f"a group of {ranks} of {world_size()} ranks",
            fix="Build the model without zero.Init, or pass a mesh whose shard axis has the ranks of your choice.",
        )


class OnDevice:
    """Build a model on ``device`` with floating-point values in ``dtype``: ``with
    OnDevice(dtype=torch.bfloat16, device="meta"): model = Model()``.

    ``dtype`` applies to parameters and to floating-point tensors from torch.empty, zeros, ones and
    full. Other new tensors are on ``device`` in their own dtype. On the meta device nothing is
    allocated; ``initialize(weights=)`` loads the values of such a model. ``enabled=False``: a
    no-op.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._block = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._block.enter_context(self._device)
            self._block.enter_context(_InDtype(self._dtype))
            # torch annotates hooks as returning None, but registers a parameter that they return
            handle = register_module_parameter_registration_hook(cast("Callable[..., None]", self._moved))
            self._block.callback(handle.remove)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()

    def _moved(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Return a parameter to replace one that other functions have created."""
        if param is None:
            return None
        dtype = self._dtype if param.is_floating_point() else param.dtype
        if (param.device.type, param.dtype) == (self._device.type, dtype):
            return None
        return nn.Parameter(param.detach().to(self._device, dtype), param.requires_grad)


class _InDtype(TorchFunctionMode):
    """Casts the results of functions that allocate."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func in (torch.empty, torch.zeros, torch.ones, torch.full)
        return result.to(self._dtype) if made and result.is_floating_point() else result


class _Lifting(TorchFunctionMode):
    """Gathers a cut parameter for the function that touches it; the oldest are cut again."""

    # for code that cannot be built like this: every rank must build the same modules
    cuts_parameters = True

    def __init__(self) -> None:
        super().__init__()
        self._open: OrderedDict[int, PreSharded] = OrderedDict()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if func not in METADATA and func is not torch.Tensor.requires_grad_:
                for leaf in tree_flatten((args, kwargs))[0]:
                    sharded = owner_of_param(leaf) if isinstance(leaf, nn.Parameter) else None
                    if isinstance(sharded, PreSharded):
                        self._lift(sharded)
        return func(*args, **(kwargs or {}))

    def close_all(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for sharded in self._open.values():
                sharded.cut()
        self._open.clear()

    def _lift(self, sharded: PreSharded) -> None:
        with torch.no_grad():
            self._open.pop(id(sharded), None)
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)[1].cut()
            sharded.lift()
        self._open[id(sharded)] = sharded
