"""A proxy engine, through which a trial's own ``train_batch`` runs on one planned engine after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine
from zero_trial.engine.build import build_engine
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.errors import ConfigError, TrialError
from zero_trial.preflight.dry_run import Blueprint, Role, dry_run_any, first_rows, rows_of, variant, with_state_at
from zero_trial.preflight.fake_comm import FAKE_SWAP, fake_mesh
from zero_trial.preflight.plan import Figures


class ProxyEngine:
    """What the trial takes for its engine. Every question and call goes to the engine that plays at the moment."""

    def __init__(self, playing: Engine) -> None:
        self.playing = playing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.playing(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.playing, name)


@dataclass(frozen=True)
class _Part:
    blueprint: Blueprint
    settings: DsConfig
    understudy: ProxyEngine


class TrialSubject:
    """A trial built with :meth:`factory` in the place of ``zero_trial.initialize``; see :class:`zero_trial.preflight.dry_run.Subject`.

    Give it the trial's micro-batch with :meth:`perform` before rehearsing. Several engines (a GAN) are planned together.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        self.ranks = ranks
        self._device = torch.device(device)
        self._parts: list[_Part] = []
        self._train: Callable[[Any], Any] | None = None
        self._batches: list[Any] = []
        self._calls_per_step: int | None = None

    def factory(
        self,
        args: Any = None,
        model: nn.Module | None = None,
        config: Any = None,
        config_params: Any = None,
        **options: Any,
    ) -> Any:
        """The signature of ``zero_trial.initialize``: ``(engine, optimizer, loader, lr_scheduler)``, the first an :class:`Understudy`."""
        if model is None:
            raise ConfigError(
                "initialize() needs a model", where="initialize(model)", got=None, expected="a torch.nn.Module"
            )
        named = getattr(args, "deepspeed_config", None)
        source = next((value for value in (config, config_params, named) if value is not None), None)
        settings = source if isinstance(source, DsConfig) else read_ds_config(source or {})
        kept = {
            key: _listed(value)
            for key, value in options.items()
            if key in ("optimizer", "model_parameters", "lr_scheduler")
        }
        blueprint = Blueprint(model, kept, self._device)
        with blueprint.without_values(imagined=True):
            given = blueprint.options(imagined=True)
            engine = build_engine(
                given.pop("model"),
                _quiet(settings, self.ranks),
                fake_mesh(mesh_shape(settings, self.ranks)),
                self._device,
                places=FAKE_SWAP,
                **given,
            )
        understudy = ProxyEngine(engine)
        self._parts.append(_Part(blueprint, settings, understudy))
        return understudy, engine.optimizer, None, engine.lr_scheduler

    def perform(
        self, train: Callable[[Any], Any], batches: Sequence[Any], *, calls_per_step: int | None = None
    ) -> None:
        """``train(iterator)`` is one call of the trial's ``train_batch``; ``batches`` are real ones of its loader, handed out in turn.

        ``calls_per_step``: 1 for a trial that does all micro-batches of a step itself; None: once per micro-batch.
        """
        self._train, self._batches, self._calls_per_step = train, list(batches), calls_per_step

    @property
    def settings(self) -> DsConfig:
        """The first engine's."""
        if not self._parts:
            raise TrialError(
                "the trial made no engine", where="plan", fix="Call context.initialize(model=...) in its __init__."
            )
        return self._parts[0].settings

    @property
    def parameters(self) -> int:
        return sum(part.blueprint.parameters for part in self._parts)

    def rehearse(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        stage, accumulation = settings.zero_optimization.stage, settings.gradient_accumulation_steps or 1
        place = settings.zero_optimization.offload_optimizer
        roles = [
            Role(
                part.blueprint,
                variant(
                    with_state_at(part.settings, place),
                    stage=stage,
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                ),
            )
            for part in self._parts
        ]
        if self._train is None:
            return dry_run_any(roles, ranks, None, one_host=one_host)
        train = self._train
        given = [first_rows(batch, rows, micro_batch) if (rows := rows_of(batch)) else batch for batch in self._batches]

        def micro(engines: Sequence[Engine], batches: Sequence[Any]) -> None:
            for part, engine in zip(self._parts, engines, strict=True):
                part.understudy.playing = engine
            train(_again(batches))

        return dry_run_any(roles, ranks, micro, given, calls=self._calls_per_step or accumulation, one_host=one_host)


def _again(batches: Sequence[Any]) -> Any:
    """The batches in turn, for ever."""
    while True:
        yield from batches


def _listed(value: Any) -> Any:
    """Generators of parameters as lists, so that they can be read more than once."""
    return list(value) if hasattr(value, "__next__") else value


def _quiet(settings: DsConfig, ranks: int) -> DsConfig:
    """The same settings without monitors and profilers."""
    batch = resolve_config(settings, mesh_shape(settings, ranks).data_parallel_size).batch
    stage = settings.zero_optimization.stage
    return variant(settings, stage=stage, micro_batch=batch.micro_batch_size, accumulation=batch.accumulation)
