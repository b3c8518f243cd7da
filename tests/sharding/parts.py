"""Small groups, gradient buffers and models to test the pieces of sharding with: on one rank
without a world, on several with the pool's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, build_mesh
from zero_trial.comm.waits import Heartbeat
from zero_trial.sharding.build_groups import fill_shard
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.grouping import GroupingLimits, ShardingSettings, UnshardLimits
from zero_trial.sharding.layout import lay_out
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import cut_pieces
from zero_trial.sharding.plan import Home, Reshard, plan_for_stage
from zero_trial.sharding.precision import dtype_policy
from zero_trial.sharding.unshard import Unsharder


def alone() -> AxisComm:
    """An axis of one rank."""
    return AxisComm("shard", (0,), 0, None, CommCounters(), Heartbeat(None, 0, 1), 1.0)


def mesh_for(stage: int, shard: int | None = None) -> Mesh:
    """All ranks of the world, laid out as a ZeRO stage does it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = 1 if stage == 0 or world == 1 else shard or world
    return build_mesh(MeshShape(replica=world // size, shard=size), timeout=30.0)


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_group(
    params: Sequence[nn.Parameter],
    stage: int = 1,
    *,
    comm: AxisComm | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> ParamGroup:
    comm = comm if comm is not None else alone()
    layout = lay_out([(f"p{index}", tuple(param.shape)) for index, param in enumerate(params)], comm.size)
    home = kwargs.pop("home", Home.DEVICE)
    plan = plan_for_stage(stage, reduce_every=kwargs.pop("reduce_every", "auto"), home=home)
    fill = partial(fill_shard, layout, params, kwargs.pop("agree", None), comm.index)
    rest: dict[str, Any] = {"fill": fill, "runs": {0: (0, layout.numel)}, "device": torch.device("cpu")} | kwargs
    return ParamGroup(
        kwargs.pop("name", "group"),
        layout,
        params,
        plan=plan,
        dtype=dtype,
        comm=comm,
        **{k: v for k, v in rest.items() if k != "name"},
    )


def freeing() -> Unsharder:
    """An unsharder without hooks, for groups of which a test says when they are gathered."""
    return Unsharder({}, {}, Reshard.WITHIN_LIMITS, UnshardLimits())


def make_grad_buffer(
    group: ParamGroup, dtype: torch.dtype | None = None, shard_dtype: torch.dtype | None = None
) -> tuple[GradBuffer, list[GradBuffer]]:
    """A gradient buffer and the list of its completions."""
    done: list[GradBuffer] = []
    dtype = dtype or group.dtype
    buffer = GradBuffer(group, dtype=dtype, shard_dtype=shard_dtype or dtype)
    buffer.register_hooks(done.append)
    return buffer, done


def make_model(
    module: nn.Module,
    stage: int,
    *,
    precision: str = "fp32",
    accumulation: int = 1,
    mesh: Mesh | None = None,
    opt_groups: Sequence[Sequence[nn.Parameter]] | None = None,
    settings: ShardingSettings | None = None,
    plan: Mapping[str, str] = {},
) -> ShardedModel:
    """``module`` sharded as a ZeRO stage does it, without an engine."""
    return ShardedModel(
        module,
        opt_groups if opt_groups is not None else [[p for p in module.parameters() if p.requires_grad]],
        plan_for_stage(stage, **plan),
        mesh if mesh is not None else mesh_for(stage),
        dtype_policy(precision, accumulation_steps=accumulation),
        settings if settings is not None else ShardingSettings(),
    )


_OPTIMIZERS: WeakKeyDictionary[ShardedModel, ShardedOptimizer] = WeakKeyDictionary()


def add_optimizer(
    model: ShardedModel, base: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any
) -> ShardedOptimizer:
    pieces = cut_pieces(model.grad_buffers)
    made = ShardedOptimizer(base([piece.weight for piece in pieces], **kwargs), pieces, groups=model.groups)  # type: ignore[call-arg]
    _OPTIMIZERS[model] = made
    return made


def optimizer_of(model: ShardedModel) -> ShardedOptimizer:
    """The one that :func:`add_optimizer` made."""
    return _OPTIMIZERS[model]


def run_update(
    optimizer: ShardedOptimizer,
    multiplier: float,
    updated: Callable[[Sequence[ParamGroup], bool], None] = lambda groups, rounded: None,
) -> None:
    """One update of all pieces."""
    for groups, rounded in optimizer.update(multiplier):
        updated(groups, rounded)


def train_step(model: ShardedModel, loss: torch.Tensor) -> None:
    """One optimizer step on ``loss``, without an engine."""
    model.begin_backward(reduce=True, last=True)
    loss.backward()
    model.end_backward()
    model.wait_before_writing()
    run_update(optimizer_of(model), 1.0 / model.mesh.data.size)
    model.reducer.reset()
    model.publish()


def address(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


class Small(nn.Module):
    """Matrices, vectors and a scalar, which :func:`by_decay` puts into two optimizer groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = (self.scale * x).square().mean()
        return out


def by_decay(module: nn.Module) -> list[list[nn.Parameter]]:
    """Matrices in one optimizer group, the rest in another."""
    params = list(module.parameters())
    return [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]


def build_small(stage: int, **kwargs: Any) -> ShardedModel:
    torch.manual_seed(0)
    module = Small()
    return make_model(
        module,
        stage,
        opt_groups=by_decay(module),
        settings=ShardingSettings(limits=GroupingLimits(bucket=100, persistence=10)),
        **kwargs,
    )
