"""``Trainer(strategy=ZeroTrialStrategy(stage=3))``: Lightning's Trainer on a zero_trial engine,
also on CPU.

    from zero_trial.lightning import ZeroTrialStrategy

Lightning keeps its loop: it decides when gradients have accumulated, steps the schedulers and
casts (``precision="bf16-mixed"`` is its autocast). The engine reduces, clips and steps, and writes
checkpoints in zero_trial's format: a folder with the name that ModelCheckpoint chose, read on any
number of ranks and at any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from zero_trial.ds_config.presets import preset_names, read_preset
from zero_trial.engine import Engine, initialize
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.schema.source import open_source
from zero_trial.zero import Init

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
_TRAINERS = {
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "gradient_clipping": "gradient_clip_val",
    "train_batch_size": "devices and the loaders",
    "bf16": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
}
"""Keys of a ds_config -> the Trainer's argument that says the same."""


class ZeroTrialStrategy(DDPStrategy):  # type: ignore[misc]
    """Train a LightningModule on a zero_trial engine: one optimizer, automatic or manual
    optimization.

    Refused, each with what to write instead: more than one optimizer, fp16 and float64, clipping by
    value, an own ``configure_gradient_clipping``, ``training_step`` without a loss, checkpoints of
    plain Lightning, and ds_config keys that the Trainer's own arguments state.

    Args:
        stage: the ZeRO stage, where there is no ``config`` (default 2).
        config: a ds_config as a dict or file, or a preset such as ``"zero_3_offload"``. An
            ``optimizer`` in it takes the place of ``configure_optimizers``.
        options: those of DDPStrategy that concern processes: ``process_group_backend``,
            ``timeout``, ``start_method``, ``cluster_environment``, ``parallel_devices``.
    """

    strategy_name = "zero_trial"

    def __init__(
        self, stage: int | None = None, config: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> None:
        if stage is not None and config is not None:
            raise ConfigError("given twice", where="ZeroTrialStrategy", got="stage and config", fix="Give one of them.")
        super().__init__(**options)
        self._forward_redirection = _ForwardRedirection()
        if config is None:
            config = {"zero_optimization": {"stage": 2 if stage is None else stage}}
        known = isinstance(config, str) and config in preset_names()
        self._config = (read_preset(config, "ZeroTrialStrategy(config)") if known else open_source(config)).value
        for key in _TRAINERS.keys() & self._config.keys():
            raise ConfigError(
                "the Trainer says this",
                where=f"ZeroTrialStrategy(config) {key}",
                got=repr(self._config[key]),
                fix=f"Remove it and use Trainer's {_TRAINERS[key]}.",
            )
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine. Raises TrialError before the Trainer has set the strategy up."""
        if self._engine is None:
            raise TrialError("there is no engine yet", where="ZeroTrialStrategy.engine", fix="Ask in on_fit_start.")
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
        _refuse_settings(trainer, module, self.precision_plugin.precision)
        self.accelerator.setup(trainer)
        if self._engine is not None:  # of an earlier fit or validate
            self._engine.destroy()
        self.optimizers: list[Any] = []
        self.model = self.precision_plugin.convert_module(module)
        if fitting and "optimizer" not in self._config:
            super(DDPStrategy, self).setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ConfigError(
                "one engine steps one optimizer",
                where="configure_optimizers",
                got=f"{len(self.optimizers)} optimizers",
                fix="Give one optimizer with several parameter groups.",
            )
        self._engine, optimizer, _, _ = initialize(
            model=self.model,
            optimizer=self.optimizers[0] if self.optimizers else None,
            config=self._engine_config(trainer, fitting),
        )
        self.model = self._engine
        if fitting and optimizer is not None:
            self.optimizers = [optimizer]
        self.barrier()

    def _engine_config(self, trainer: Trainer, fitting: bool) -> dict[str, Any]:
        """Return the ds_config with what the Trainer's arguments mean."""
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, **self._config}
        if not fitting:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        return {
            **config,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # Lightning's loop owns the boundary
            "gradient_clipping": float(trainer.gradient_clip_val or 0.0),
            **({"bf16": {"enabled": True}} if self.precision_plugin.precision == "bf16-true" else {}),
        }

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build what ``configure_model`` builds in shards, at stage 3."""
        section = self._config.get("zero_optimization") or {}
        with Init(enabled=section.get("stage") == 3):
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The engine reads checkpoints, so it is built first."""
        return True

    def teardown(self) -> None:
        """Leave the engine as it is, so that ``trainer.save_checkpoint`` works after fit;
        ``strategy.engine.destroy()`` makes the module an ordinary one again."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- a step -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` inside the engine's forward; in manual optimization, whose backward
        passes and steps are inside of it, as it is."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, **kwargs: Any) -> torch.Tensor:
        """Take the gradients of a loss that Lightning has divided by the accumulation."""
        if is_overridden("backward", self.lightning_module, LightningModule):
            raise TrialError("the engine runs backward", where="LightningModule.backward", fix="Remove the override.")
        loss: torch.Tensor = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        after: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return after

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward) and take the engine's step, which clips."""
        trainer, module = self.lightning_module.trainer, self.lightning_module
        result = closure()
        if result is None and module.automatic_optimization:
            raise TrialError(
                "there is no loss",
                where="training_step",
                got=None,
                fix="Return a loss, on every rank, for every batch.",
            )
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        self.engine.step()
        return result

    # --- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine writes the weights from their shards."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine writes the state from its shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the folder ``filepath``: the engine's state, and Lightning's own beside it.
        Collective."""
        if storage_options is not None:
            raise ConfigError("checkpoints are local folders", where="save_checkpoint", got="storage_options")
        path = Path(self.broadcast(str(filepath)))
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.engine.save_checkpoint(path.parent, tag=path.name, client_state={"lightning": _plain(kept)})

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote into the engine, and return Lightning's
        own part. Collective."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            raise CheckpointError(
                "not a checkpoint of zero_trial" if path.exists() else "there is no such checkpoint",
                where="ckpt_path",
                got=str(path),
                expected="a folder that a Trainer with ZeroTrialStrategy has saved",
                fix="Read weights of plain Lightning with load_state_dict before fit." if path.exists() else None,
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
        """The engine has read the optimizer's state."""
        return False

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has read the weights."""


def _refuse_settings(trainer: Trainer, module: LightningModule, precision: str) -> None:
    """Raise ConfigError for arguments of the Trainer and overrides that the engine does not
    serve."""
    if precision not in _PRECISIONS:
        raise ConfigError(
            "not a precision of this strategy",
            where="Trainer(precision)",
            got=precision,
            expected=", ".join(_PRECISIONS),
        )
    if trainer.gradient_clip_algorithm == "value":
        raise ConfigError(
            "the engine clips by norm",
            where="Trainer(gradient_clip_algorithm)",
            got="value",
            fix='Use gradient_clip_algorithm="norm".',
        )
    if is_overridden("configure_gradient_clipping", module, LightningModule):
        raise ConfigError(
            "the engine clips, inside its step",
            where="configure_gradient_clipping",
            fix="Remove the override and use Trainer(gradient_clip_val=...).",
        )


def _plain(value: Any) -> Any:
    """Return Lightning's state with its own kinds of dicts and paths as plain ones."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(inner) for inner in value) if type(value) in (list, tuple) else list(value)
    return str(value) if isinstance(value, Path) else value
