"""Build an engine from its parts, on ranks that have already joined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.comm import Mesh, fail_together, read_rank_env
from zero_trial.ds_config.keys_training import EmaSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.compat import rank_loader
from zero_trial.engine.engine import Engine
from zero_trial.engine.lr_schedules import choose_lr_scheduler, log_who_steps, require_one_scheduler
from zero_trial.engine.observe import Observer, build_observer
from zero_trial.engine.offload_config import OffloadPlan, plan_offload, resolve_home
from zero_trial.engine.optimizer_plan import OptimizerPlan, made_by_client, plan_optimizer, unbuildable
from zero_trial.engine.optimizers import Groups, groups_over, parameter_groups
from zero_trial.engine.pipeline_build import ResolvedPipeline, build_layers, resolve_pipeline
from zero_trial.engine.pipeline_engine import PipelineEngine
from zero_trial.engine.resolved_config import ResolvedConfig, resolve_config
from zero_trial.engine.start_checks import (
    Facts,
    find_together,
    groups_of,
    log_dtypes,
    log_model_parts,
    log_untrained,
    require_initialized,
    require_no_engine,
    require_no_max_norm,
    require_not_wrapped,
    require_unrounded,
    start_of,
    start_together,
)
from zero_trial.engine.step import StepOutcome
from zero_trial.engine.weights import StoredWeights, give_values
from zero_trial.errors import TrialError
from zero_trial.pipeline.module import PipelineModule
from zero_trial.sharding.ema import KIND, WeightAverage
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.pieces import cut_pieces, rebind
from zero_trial.sharding.quantized import PackedWeights, require_freeable
from zero_trial.sharding.whole_tensors import ROUND, own_tensors


def build_engine(
    model: nn.Module,
    settings: DsConfig,
    mesh: Mesh,
    device: torch.device,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    *,
    training_data: Any = None,
    collate_fn: Any = None,
    observed: bool = False,
    weights: tuple[str | Path, str] | None = None,
) -> Engine:
    """Build the engine on a mesh that exists already; arguments as in :func:`initialize`.
    Collective over the mesh.

    ``observed``: with monitors, timers and log lines. ``weights``: files and prefix.
    """
    has_parameters = model_parameters is not None or isinstance(optimizer, torch.optim.Optimizer)
    resolved, packed = find_together(
        mesh, lambda: _begin(model, settings, mesh, device, lr_scheduler, has_parameters=has_parameters)
    )
    if device.type == "meta":  # a memory plan asks for its attributes only
        weights = None
    else:
        give_values(model, mesh.data, device, by_files=weights is not None)
    plan = _plan_optimizer(model, settings, mesh, optimizer, model_parameters)
    opt_groups = plan.params if plan is not None else []
    pipeline: ResolvedPipeline | None = None
    if isinstance(model, PipelineModule):
        resolved, pipeline = resolve_pipeline(model, settings, mesh, resolved, device)
    living = LivingDtypes(model, resolved.policy)
    elsewhere = mesh.pipe.gather_json(living.unmatched, "fp32 modules") if mesh.pipe.size > 1 else [living.unmatched]
    living.require_matches([name for name in living.unmatched if all(name in each for each in elsewhere)])
    if weights is None:
        require_unrounded(model, living)
    log_dtypes(model, living, mesh)
    log_model_parts(model, mesh, resolved)
    everything = list(model.parameters())
    resolved = resolve_home(settings, resolved, mesh, everything, device, in_pipeline=pipeline is not None)
    trained = list(itertools.chain.from_iterable(opt_groups))
    if plan is not None:
        log_untrained(model, trained, mesh)
    require_no_max_norm(model, trained, mesh.data.size, freed=resolved.plan.frees_parameters)
    if resolved.plan.frees_parameters:
        require_freeable(model)
    offload = plan_offload(settings, resolved.plan, mesh, device, trained, living, everything)
    manual_groups = pipeline.manual_groups if pipeline is not None else ()
    outcome = StepOutcome(resolved, mesh, device)
    values = StoredWeights(model, *weights, mesh, manual_groups, living).read_into if weights is not None else None
    sharded = ShardedModel(
        model,
        opt_groups,
        resolved.plan,
        mesh,
        resolved.policy,
        resolved.sharding,
        manual_groups,
        offload.on_group_built,
        outcome,
        device,
        values,
        packed,
    )
    wrapped = _build_optimizer(sharded, outcome, plan, offload, settings.ema) if plan is not None else None
    lr_scheduler = choose_lr_scheduler(wrapped.base if wrapped is not None else None, lr_scheduler, settings)
    if mesh.rank == 0:
        log_who_steps(lr_scheduler)
    observer = Observer()
    if observed:  # only rank 0 opens the monitors
        observer = start_together(mesh, lambda: build_observer(settings, resolved, model, mesh, device))
    # as in DeepSpeed: a pipeline reads the data in its own order
    options = {"shuffle": pipeline is None} | ({"collate_fn": collate_fn} if collate_fn is not None else {})
    loader = None
    if training_data is not None:
        loader = rank_loader(training_data, resolved.batch.micro_batch_size, mesh, settings, **options)
    parts = (model, sharded, wrapped, lr_scheduler, outcome, observer, resolved, settings, mesh, device)
    place: dict[str, Any] = {"client_mpu": mpu, "training_dataloader": loader, "collate_fn": collate_fn}
    place |= {"client_optimizer": optimizer is not None, "local_rank": read_rank_env().local_rank}
    return Engine(*parts, **place) if pipeline is None else PipelineEngine(*parts, **place, resolved_pipeline=pipeline)


def _begin(
    model: nn.Module, settings: DsConfig, mesh: Mesh, device: torch.device, lr_scheduler: Any, *, has_parameters: bool
) -> tuple[tuple[ResolvedConfig, PackedWeights], Facts]:
    """Resolve ds_config, build a pipeline's layers, and refuse untrainable models. Local.
    ``has_parameters``: see :func:`build_layers`."""
    require_one_scheduler(lr_scheduler, settings)
    resolved = resolve_config(settings, mesh.data.size, device.type)
    if isinstance(model, PipelineModule):
        build_layers(model, settings, mesh, has_parameters=has_parameters)
    require_initialized(model)
    require_not_wrapped(model)
    require_no_engine(model)
    return (resolved, PackedWeights(model, device)), start_of(model, settings, resolved)


def _plan_optimizer(
    model: nn.Module,
    settings: DsConfig,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
) -> OptimizerPlan | None:
    """Return the plan of the client's or ds_config's optimizer; None without either."""
    trains = optimizer is not None or settings.optimizer is not None

    def find() -> tuple[Groups, Facts]:
        groups = parameter_groups(model, optimizer, model_parameters)
        return groups, {"initialize(optimizer)": groups_of(model, groups, optimizer) if trains else ["no optimizer"]}

    groups = find_together(mesh, find)
    own = sum(len(group["params"]) for group in groups)
    if trains and not any(count for (count,) in mesh.world.gather_row([own], "trained parameters")):
        every = [param.requires_grad for param in model.parameters()]
        raise TrialError(
            "the optimizer has no parameter that requires a gradient, so there is nothing to train",
            where="initialize(model)",
            got=f"{type(model).__name__} with {len(every)} parameters, {sum(every)} of them trainable",
            fix="Call requires_grad_(True) on what is to be trained before initialize(), and pass it where model_parameters "
            "or an optimizer is given. For inference, leave the optimizer out of ds_config and of initialize().",
        )
    return plan_optimizer(optimizer, groups, model, settings, mesh) if trains else None


def _build_optimizer(
    sharded: ShardedModel, outcome: StepOutcome, plan: OptimizerPlan, offload: OffloadPlan, ema: EmaSection | None
) -> ShardedOptimizer:
    """Build the optimizer over this rank's pieces and whole tensors: rebind the client's object to
    them, or call its factory. Collective over shard if a factory gets whole tensors, because it may
    read their values."""
    buffers, shard = sharded.grad_buffers, sharded.mesh.shard
    names = [name for name, _ in sharded.module.named_parameters()]
    most = math.inf if plan.at_once else ROUND
    whole = own_tensors(buffers, plan.whole, names, shard, plan.work, one_owner=plan.one_owner, most=most)
    own = whole.own if whole is not None else ()
    pieces = cut_pieces(buffers, whole=plan.whole, most=offload.most, make=offload.piece)
    weights: list[list[nn.Parameter]] = [[] for _ in plan.groups]
    for part in (*own, *pieces):
        weights[part.opt_group].append(part.weight)
    if plan.client is not None:
        base = plan.client
        rebind(base, weights)
    elif whole is not None and plan.by_callable:
        with offload.lent(), whole.at_hand(gradients=False):
            base = fail_together(
                sharded.mesh.world, lambda: made_by_client(plan, weights), "build optimizer", unbuildable
            )
    else:
        base = plan.make(groups_over(weights, plan.groups))
    store = offload.store(base, pieces, own, (KIND,) if ema is not None else ())
    return ShardedOptimizer(
        base,
        pieces,
        groups=sharded.groups,
        shard=shard,
        status=outcome,
        store=store,
        whole=whole,
        at_once=plan.at_once,
        publisher=sharded,
        ema=WeightAverage(ema) if ema is not None else None,
    )
