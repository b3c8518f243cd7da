"""``Trainer(strategy=ZeroTrialStrategy(stage=3))``: Lightning's Trainer on a zero_trial engine,
also on CPU.

    from zero_trial.lightning import ZeroTrialStrategy

Lightning keeps its loop: it controls gradient accumulation, steps the schedulers and casts
(``precision="bf16-mixed"`` is its autocast). The engine reduces, clips and steps, and writes
checkpoints in zero_trial's format: a folder with ModelCheckpoint's name that can be loaded on any
number of ranks and at any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from zero_trial.ds_config.overlay import preset_names, read_preset
from zero_trial.engine import Engine, initialize
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.schema.config_source import open_source
from zero_trial.zero import Init

_TRAINERS = {
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "train_batch_size": "devices and the loaders",
    "bf16": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
}
"""Keys of a ds_config -> the Trainer's argument with the same meaning."""
_OPTIONS = {
    *("accelerator", "parallel_devices", "cluster_environment", "precision_plugin", "process_group_backend"),
    *("timeout", "start_method", "broadcast_buffers"),
}
_CALLBACKS = {
    StochasticWeightAveraging: 'Use "ema" in the strategy\'s config, or average saved checkpoints.',
    ModelPruning: "Prune before fit, and keep the mask with a parametrization of your own.",
    BaseFinetuning: "Set requires_grad before fit; to unfreeze, save, and fit again from that checkpoint's weights.",
}
"""Callbacks that change the weights or the optimizer without the engine -> what to do instead."""
_ENGINES: WeakKeyDictionary[LightningModule, ReferenceType[Engine]] = WeakKeyDictionary()
"""Module -> the engine that a Trainer has left around it."""
_LATEST: list[Engine] = []
"""The last Trainer's engine: it has its module's values, even if that Trainer no longer exists."""


class _ClipsModule:
    """Makes ``clip_gradients`` use the module's parameters, not the optimizer's shards."""

    def convert_module(self, module: Any) -> Any:
        self._module = module
        return super().convert_module(module)  # type: ignore[misc]

    def main_params(self, optimizer: Any) -> Iterator[torch.nn.Parameter]:
        return (param for param in self._module.parameters() if param.requires_grad)


class _Full(_ClipsModule, Precision):  # type: ignore[misc]
    pass


class _Half(_ClipsModule, HalfPrecision):  # type: ignore[misc]
    pass


class _Mixed(_ClipsModule, MixedPrecision):  # type: ignore[misc]
    pass


class ZeroTrialStrategy(DDPStrategy):  # type: ignore[misc]
    """Train a LightningModule on a zero_trial engine: one optimizer, automatic or manual
    optimization.

    Gradients are reduced at the end of backward, so at stages 0 and 1 hooks see the same gradients
    as with DDP, and clipping by value or by own code works. At stages 2 and 3 only the engine
    clips, by norm.

    Not supported (the errors name alternatives): more than one optimizer, fp16 and float64,
    ``training_step`` without a loss, callbacks that change weights or optimizer directly,
    checkpoints of plain Lightning, and ds_config keys that duplicate the Trainer's arguments.

    Args:
        stage: the ZeRO stage if there is no ``config`` (default 2).
        config: a ds_config as a dict or file, or a preset such as ``"zero_3_offload"``. An
            ``optimizer`` in it replaces ``configure_optimizers``.
        options: DDPStrategy's options for processes: ``process_group_backend``, ``timeout``,
            ``start_method``, ``cluster_environment``, ``parallel_devices``; and
            ``broadcast_buffers``.
    """

    strategy_name = "zero_trial"

    def __init__(
        self, stage: int | None = None, config: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> None:
        if stage is not None and config is not None:
            raise ConfigError(
                "given twice", where="ZeroTrialStrategy", got="stage and config", fix="Pass only one of them."
            )
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(
                "not an option of this strategy",
                where=f"ZeroTrialStrategy({unknown[0]})",
                got=repr(options[unknown[0]]),
                expected=", ".join(sorted(_OPTIONS)),
            )
        super().__init__(**options)
        self._forward_redirection = _ForwardRedirection()
        if config is None:
            config = {"zero_optimization": {"stage": 2 if stage is None else stage}}
        known = isinstance(config, str) and config in preset_names()
        self._config = (read_preset(config, "ZeroTrialStrategy(config)") if known else open_source(config)).value
        for key in _TRAINERS.keys() & self._config.keys():
            raise ConfigError(
                "the Trainer already sets this",
                where=f"ZeroTrialStrategy(config) {key}",
                got=repr(self._config[key]),
                fix=f"Remove it and use Trainer's {_TRAINERS[key]}.",
            )
        self._engine: Engine | None = None
        self._own_buffers = False  # a training step has changed this rank's buffers

    @property
    def precision_plugin(self) -> Any:
        """Return the Trainer's precision plugin, with the engine's clipping."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
            plugin = _Half(plugin.precision)
        elif type(plugin) is MixedPrecision and plugin.scaler is None:
            plugin = _Mixed(plugin.precision, plugin.device)
        elif plugin is None or type(plugin) is Precision:
            plugin = _Full()
        self._precision_plugin = plugin

    @property
    def engine(self) -> Engine:
        """Return the engine. Raises TrialError before the Trainer has set up the strategy."""
        if self._engine is None:
            raise TrialError(
                "the engine does not exist yet",
                where="ZeroTrialStrategy.engine",
                fix="Use it in on_fit_start or later.",
            )
        return self._engine

    # --- setting up -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Build the engine around the LightningModule. Collective."""
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self.root_device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "the engine trains on this machine's GPU",
                where="Trainer(accelerator)",
                got="cpu",
                fix="Set CUDA_VISIBLE_DEVICES= to train on the CPU.",
            )
        self._refuse_settings(trainer)
        self.accelerator.setup(trainer)
        found = _ENGINES.pop(module, None)
        if found is not None and (earlier := found()) is not None:  # of an earlier run, also of another Trainer
            earlier.destroy(rank0_only=False)  # hooks and plugins may read weights before the new engine is built
        self.optimizers: list[Any] = []
        if fitting and self._layer_sync:
            module = self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        if fitting and "optimizer" not in self._config:
            super(DDPStrategy, self).setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ConfigError(
                "an engine steps only one optimizer",
                where="configure_optimizers",
                got=f"{len(self.optimizers)} optimizers",
                fix="Pass one optimizer with several parameter groups.",
            )
        self._engine, optimizer, _, _ = initialize(
            model=self.model,
            optimizer=self.optimizers[0] if self.optimizers else None,
            config=self._engine_config(trainer, fitting),
        )
        self.model, _ENGINES[module], _LATEST[:] = self._engine, ref(self._engine), [self._engine]
        # in manual optimization any backward may be the last before a step, as with DDP
        self._engine.set_gradient_accumulation_boundary(not module.automatic_optimization)
        if fitting and optimizer is not None:
            self.optimizers = [optimizer]
        self.barrier()

    def _refuse_settings(self, trainer: Trainer) -> None:
        """Raise ConfigError for arguments of the Trainer that the engine does not support."""
        if not isinstance(self.precision_plugin, _ClipsModule):
            raise ConfigError(
                "not a precision of this strategy",
                where="Trainer(precision)",
                got=self.precision_plugin.precision,
                expected="32-true, bf16-mixed, bf16-true",
            )
        for callback in trainer.callbacks:
            for kind, fix in _CALLBACKS.items():
                if isinstance(callback, kind):
                    raise ConfigError(
                        "this callback changes weights or the optimizer without the engine",
                        where="Trainer(callbacks)",
                        got=type(callback).__name__,
                        fix=fix,
                    )
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                "the engine writes checkpoints itself",
                where="Trainer(plugins)",
                got=type(self.checkpoint_io).__name__,
                fix="Remove the plugin.",
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``zero_trial`` (stage 2) and ``zero_trial_stage_0`` to ``_3``."""
        strategy_registry.register("zero_trial", cls, description="ZeRO stage 2 on a zero_trial engine")
        for stage in range(4):
            text = f"ZeRO stage {stage} on a zero_trial engine"
            strategy_registry.register(f"zero_trial_stage_{stage}", cls, description=text, stage=stage)

    def _engine_config(self, trainer: Trainer, fitting: bool) -> dict[str, Any]:
        """Return the ds_config, including the settings from the Trainer's arguments."""
        clips = bool(trainer.gradient_clip_val) and self._engine_clips(trainer)
        if trainer.gradient_clip_val and "gradient_clipping" in self._config:
            raise ConfigError("given twice", where="Trainer(gradient_clip_val)", got="also gradient_clipping in config")
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, **self._config}
        if not fitting:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        return {
            **config,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # Lightning's loop controls the boundary
            "gradient_clipping": float(trainer.gradient_clip_val) if clips else config.get("gradient_clipping", 0.0),
            **({"bf16": {"enabled": True}} if self.precision_plugin.precision == "bf16-true" else {}),
        }

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """At stage 3, shard the modules that ``configure_model`` builds."""
        section = self._config.get("zero_optimization") or {}
        with Init(enabled=section.get("stage") == 3):
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: the engine loads checkpoints, so it must be built first."""
        return True

    def teardown(self) -> None:
        """Keep the engine, so that ``trainer.save_checkpoint`` works after fit.
        ``strategy.engine.destroy()`` makes the module a plain one again (if parameters are sharded,
        only on rank 0 unless ``rank0_only=False``)."""
        module = self.lightning_module
        attached = module is not None and module._trainer is not None  # False after an early exception
        if self._layer_sync and attached and module.trainer.state.fn == TrainerFn.FITTING:
            self._layer_sync.revert(module)
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- a step -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` inside the engine's forward, or directly in manual optimization,
        where backward passes and steps are inside ``training_step``."""
        if self.engine.is_gradient_accumulation_boundary():
            self._broadcast_buffers()
        self._own_buffers = True
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` inside the engine's forward, with the buffers of rank 0."""
        self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    def _broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers (BatchNorm's averages), as DDP does before a forward whose
        backward reduces, and before validation. One message per dtype."""
        if not self._own_buffers or not self._ddp_kwargs.get("broadcast_buffers", True):
            return
        self._own_buffers = False
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.lightning_module.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in kinds.items():
            values = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.engine.mesh.data.broadcast(values, f"buffers of {dtype}")
            parts = values.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward on a loss that Lightning has divided by the accumulation steps."""
        if is_overridden("backward", self.lightning_module, LightningModule):
            raise TrialError("the engine runs backward", where="LightningModule.backward", fix="Remove the override.")
        loss: torch.Tensor = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        after: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return after

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward), then the engine's step, which clips."""
        trainer, module = self.lightning_module.trainer, self.lightning_module
        self.engine.set_gradient_accumulation_boundary(True)
        result = closure()
        if result is None and module.automatic_optimization:
            raise TrialError(
                "training_step returned no loss",
                where="training_step",
                got=None,
                fix="Return a loss, on every rank, for every batch.",
            )
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        if not self._engine_clips(trainer):
            self.precision_plugin._clip_gradients(
                module, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
            )
        self.engine.step()
        self.engine.set_gradient_accumulation_boundary(not module.automatic_optimization)
        return result

    def _engine_clips(self, trainer: Trainer) -> bool:
        """Return whether the engine clips inside its step: by norm, without a user's hook."""
        own = is_overridden("configure_gradient_clipping", self.lightning_module, LightningModule)
        return trainer.gradient_clip_algorithm != "value" and not own

    # --- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return {}: the engine writes the weights from their shards."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the engine writes the state from its shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the folder ``filepath``: the engine's state and Lightning's own. Collective."""
        if storage_options is not None:
            raise ConfigError("checkpoints are local folders", where="save_checkpoint", got="storage_options")
        path = Path(self.broadcast(str(filepath)))
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.engine.save_checkpoint(path.parent, tag=path.name, client_state={"lightning": _plain(kept)})

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint after a background save has completed. Collective."""
        self.engine.wait_for_checkpoint()
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of :meth:`save_checkpoint`; return Lightning's own part. Collective."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            raise CheckpointError(
                "not a checkpoint of zero_trial" if path.exists() else "the checkpoint does not exist",
                where="ckpt_path",
                got=str(path),
                expected="a folder that a Trainer with ZeroTrialStrategy has saved",
                fix="Load weights of plain Lightning with load_state_dict before fit." if path.exists() else None,
            )
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        _, state = self.engine.load_checkpoint(
            path.parent,
            tag=path.name,
            load_module_strict=self.lightning_module.strict_loading,
            load_lr_scheduler_states="scheduler" in self._config,
            load_module_only=not fitting,
        )
        if state is None or "lightning" not in state:
            raise CheckpointError("a checkpoint without Lightning's state", where="ckpt_path", got=str(path))
        return {**state["lightning"], "state_dict": {}}

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return False: the engine has already loaded the optimizer's state."""
        return False

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has loaded the weights."""


def _plain(value: Any) -> Any:
    """Return Lightning's state with its dict subclasses and paths converted to plain types."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(inner) for inner in value) if type(value) in (list, tuple) else list(value)
    return str(value) if isinstance(value, Path) else value


ZeroTrialStrategy.register_strategies(StrategyRegistry)
