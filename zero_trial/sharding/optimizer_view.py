"""What torch and DeepSpeed see of the optimizer: groups, state dict, loss scale."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from zero_trial.errors import CheckpointError
from zero_trial.ops.optimizers.shard_step import StepGuard, past_engine, state_hooks
from zero_trial.sharding.full_params import ParameterOffload
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer_state import StateByTensor
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import all_at_initialize
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.precision import DynamicScale, StaticScale, StepStatus

# DeepSpeed's names -> DynamicScale's
_COUNTERS = {
    "cur_iter": "iteration",
    "last_overflow_iter": "last_overflow",
    "cur_hysteresis": "hysteresis_left",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "min_scale": "min_scale",
}


class LossScaleView:
    """The loss scale under the names of DeepSpeed's optimizers. Each read returns the
    current value. ``cur_iter`` counts steps, and ``scale_window`` is how many steps without an
    overflow double the scale; a static scale has no counters."""

    def __init__(self, status: StepStatus) -> None:
        self._status = status

    @property
    def cur_scale(self) -> float:
        return self._status.loss_scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        return isinstance(self._status.scaler, DynamicScale)

    dynamic_loss_scale = dynamic

    def __getattr__(self, name: str) -> Any:
        if name not in _COUNTERS:
            raise AttributeError(f"the loss scale has no {name!r}")
        return getattr(self._status.scaler, _COUNTERS[name], 0 if name == "cur_iter" else None)


class TorchView(torch.optim.Optimizer):
    """The torch.optim.Optimizer interface of a sharded optimizer, for torch and DeepSpeed: settings
    by parameter group, and the loss scale.

    torch's schedulers accept it, and write into the parameter groups of ``base``, which it shares.

    Args:
        base: the optimizer that updates this rank's shards.
        state_by_tensor: its masters and state, for checkpoints.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then reaches step() and its error

    def __init__(
        self,
        base: torch.optim.Optimizer,
        state_by_tensor: StateByTensor,
        status: StepStatus,
        publisher: ShardedModel | None,
        groups: Sequence[ParamGroup],
    ) -> None:
        # torch's own constructor would make other groups and state
        self.base = base
        self.state_by_tensor = state_by_tensor
        self.guard = StepGuard(base)
        self._groups = groups
        self._publisher = publisher
        self._status = status
        self.loss_scaler = self.loss_scale_config = LossScaleView(status)
        self._opt_called = False  # torch's schedulers ask whether a step was taken

    # --- torch's and DeepSpeed's names ------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A class derived from this one and the base's: ``isinstance(engine.optimizer, AdamW)``
        holds, and wrappers that derive from it (Lightning's) find the methods of this class.
        ``type()`` returns the real class."""
        kinds: tuple[type, type] = (type(self), type(self.base))
        return _class_of_both(*kinds)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps on this rank's pieces, under DeepSpeed's name."""
        self._wait_for_copies()  # the caller may write into its state
        return self.base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        self._wait_for_copies()  # the caller may write into it
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    @property
    def loss_scale(self) -> float:
        return self._status.loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of a non-finite gradient."""
        return self._status.overflow

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """Return whether a loss must be scaled (fp16), as ``engine.backward`` does."""
        return self._status.scaler != StaticScale(1.0)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's shards of the masters, one for each parameter group of the model, under
        DeepSpeed's names. Masters on NVMe read as NaN."""
        return [group.master for group in self._groups if group.trainable]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def cuts(self) -> tuple[bool, bool, bool]:
        """Whether optimizer state, gradients and parameters are cut into shards."""
        state, grads, params = (
            zip(*(group.plan.cuts for group in self._groups), strict=True) if self._groups else ((),) * 3
        )
        return any(state), any(grads), any(params)

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The owner of stage 3's hooks, under DeepSpeed's name, at stage 3 only."""
        if all(group.plan.params is Lifetime.ALWAYS for group in self._groups):
            raise AttributeError("parameter_offload only exists at ZeRO stage 3")
        return ParameterOffload()

    def get_lr(self) -> Any:
        """Return the learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: Any) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def step(self, closure: Any = None) -> NoReturn:
        """Raise TrialError: a plain torch loop would step without reduced gradients."""
        raise past_engine()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients from before the first micro-batch of a step, as plain torch does: those
        from another engine's loss. Between micro-batches, nothing is dropped."""
        self.guard.zero_grad(set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError: the engine has no gradients for parameters added later."""
        raise all_at_initialize("optimizer.add_param_group")

    def refresh_fp32_params(self) -> None:
        """Copy the parameters' current values into the masters, after weights were written without
        the engine (``param.data.copy_``). Freed parameters (stage 3) are skipped."""
        self._wait_for_copies()
        with self.state_by_tensor.lent(), torch.no_grad():
            for group in self._groups:
                if group.plan.params is Lifetime.ALWAYS:
                    group.load_full()
                elif group.master is not group.shard:
                    with group.materialized():
                        group.master.copy_(group.shard)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook on the steps of :attr:`base`. Raises ConfigError if the hook would see
        flat shards: only an optimizer that had hooks before ``initialize`` steps on whole
        tensors."""
        self.guard.refuse_late_hooks(self.base)
        return self.base.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook on the steps of :attr:`base`; see :meth:`register_step_pre_hook`."""
        self.guard.refuse_late_hooks(self.base)
        return self.base.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise ConfigError: checkpoints store the state of each tensor, and would not call the
        hook."""
        raise state_hooks(self.base)

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_pre_hook = register_state_dict_pre_hook
    register_load_state_dict_post_hook = register_state_dict_pre_hook

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part as torch's dict of ``state`` and ``param_groups``, with
        ``masters`` (a tensor for each piece), ``layout`` (what is in the pieces) and
        ``loss_scaler``: copies, for :meth:`load_state_dict` of the same model on as many ranks.
        Checkpoints for other numbers of ranks are ``engine.save_checkpoint``'s.

        Collective over shard where tensors are updated whole.
        """
        if self._publisher is not None:
            self._publisher.take_live_edits()
        with self.state_by_tensor.lent(), self.state_by_tensor.at_hand():
            packed = copy.deepcopy(self.base.state_dict())
            masters = [part.weight.detach().clone() for part in self.state_by_tensor.parts]
        layout = self.state_by_tensor.layout()
        return {**packed, "masters": masters, "layout": layout, "loss_scaler": self._status.scaler.to_json()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the :meth:`state_dict` of the same rank: settings, state, masters, loss scale.
        Parameters are updated from the masters. Collective over shard.

        Raises CheckpointError, before anything is changed, if the state belongs to other shards.
        """
        own = self.state_by_tensor.layout()
        if (layout := state_dict.get("layout")) != own:
            raise CheckpointError(
                "this is not the state of this rank's part of the model",
                where="optimizer.load_state_dict",
                got=sorted(state_dict) if layout is None else _difference(layout, own),
                expected="state_dict() of the same rank, with the same number of ranks"
                if layout is None
                else _difference(own, layout),
                fix="To load on another number of ranks or at another stage, use engine.save_checkpoint and load_checkpoint.",
            )
        parts, groups = self.state_by_tensor.parts, self.base.param_groups
        masters = state_dict["masters"]
        with self._changing_masters(), torch.no_grad():
            for part, master in zip(parts, masters, strict=True):
                part.weight.copy_(master)
            weights = [weight for group in groups for weight in group["params"]]
            for index, weight in enumerate(weights):
                self.state_by_tensor.load(weight, state_dict["state"].get(index, {}))
            for group, saved in zip(groups, state_dict["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        self._status.restore_scaler(state_dict["loss_scaler"])

    @contextmanager
    def _changing_masters(self) -> Iterator[None]:
        """Let the block write masters and state, then publish. Collective over shard."""
        if self._publisher is not None:
            self._publisher.take_live_edits()
            self._publisher.wait_before_writing()
        self._wait_for_copies()
        with self.state_by_tensor.lent(), self.state_by_tensor.at_hand():
            yield
        if self._publisher is not None:
            self._publisher.publish()

    def _wait_for_copies(self) -> None:
        for group in self._groups:
            group.wait_for_copies()


@functools.cache
def _class_of_both(own: type, base: type) -> type:
    return type(base.__name__, (own, base), {})


def _difference(layout: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> str:
    """Return the first parts that only ``layout`` has."""
    known = {name for names in other for name in names}
    found = [name for names in layout for name in names if name not in known]
    return ", ".join(found[:3]) or "the same elements in other pieces"
