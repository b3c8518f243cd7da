"""The optimizer over shards: any torch optimizer, stepping on this rank's flat pieces of the master
weights, or on whole tensors if it does not work element by element.

Each whole tensor has one owner (see ``whole_tensors``).

A StateStore decides where master weights and moments are between steps: the store in ``pieces``
keeps them on the device, the stores in ``offload`` move them to host memory or files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.ops.optimizers.fused import FusedOptimizer
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, ShardUpdate, scaled_step
from zero_trial.ops.plain import seed_of
from zero_trial.sharding.ema import WeightAverage
from zero_trial.sharding.guards.freed import register_state
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.offload.moved_states import kinds_of
from zero_trial.sharding.optimizer_state import StateByTensor
from zero_trial.sharding.optimizer_view import TorchView
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import (
    ShardPiece,
    StateStore,
    all_at_initialize,
    batching,
    kept_in_place,
    parts_by_weight,
    without_empty_groups,
)
from zero_trial.sharding.precision import StepStatus
from zero_trial.sharding.whole_tensors import WholeTensor, WholeTensors


class ShardedOptimizer(TorchView):
    """Steps ``base`` on the shards' pieces; all attributes that user code expects of an optimizer
    (``param_groups``, lr) are those of ``base``.

    ``loss_scale`` and ``cur_scale`` report the engine's loss scale, as DeepSpeed's optimizer
    objects do.

    Args:
        groups: all parameter groups of the model, the same on every rank.
        shard: the axis over which they are sharded.
        whole: the tensors that are updated whole.
        at_once: whether ``base`` is stepped once per step, with all of its pieces.
        publisher: publishes the model's parameters after changes between steps.
        ema: the average of the weights.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        *,
        groups: Sequence[ParamGroup] = (),
        shard: AxisComm | None = None,
        status: StepStatus | None = None,
        store: StateStore | None = None,
        whole: WholeTensors | None = None,
        at_once: bool = False,
        publisher: ShardedModel | None = None,
        ema: WeightAverage | None = None,
    ) -> None:
        store = store if store is not None else StateStore(pieces, **batching(base, at_once))
        status = status if status is not None else StepStatus()
        moved = publisher.moved if publisher is not None else None
        state = StateByTensor(base, pieces, store, whole, moved)
        super().__init__(base, state, status, publisher, groups)
        self.pieces = list(pieces)
        self.store = store
        self.whole = whole
        # the groups that :meth:`update` yields in a step
        self.updated = [part.group for part in (*pieces, *(whole.tensors if whole is not None else ()))]
        self.ema = ema
        self._shard = shard
        self._closed = False
        self._sizes = [len(opt_group["params"]) for opt_group in base.param_groups]
        register_state((param for group in groups for param in group.params), state)
        if shard is not None:
            trained = [group for group in groups if group.trainable]
            self.bind_tensors(trained, lambda sums: shard.all_reduce_small(sums, "tensor norms"))

    def update(self, multiplier: float) -> Iterator[tuple[Sequence[ParamGroup], bool]]:
        """Step with ``multiplier`` times the reduced gradients; yield the group of each piece as
        soon as the piece is done, and whether its 16-bit copy is done, too.

        Bytes per parameter from a 16-bit gradient to a 16-bit parameter (Adam): 28 in one pass if
        the optimizer is fused, otherwise 28 and two casts of 6 each. Optimizers that sum norms over
        tensors (LAMB) are collective over shard.
        """
        sizes = [len(opt_group["params"]) for opt_group in self.base.param_groups]
        if sizes != self._sizes:
            given = {"got": f"{type(self.base).__name__} with {sizes} tensors", "expected": self._sizes}
            raise all_at_initialize("optimizer.param_groups", **given)
        self._opt_called = True
        if self.ema is not None:
            self.ema.require_trained_weights("engine.step")
            self.ema.steps += 1
        state = self.base.state
        with self.guard.open(self.base):
            if self.whole is not None:  # first: its exchanges come before any group's publication, on every rank
                groups = [tensor.group for tensor in self.whole.tensors]
                for group in dict.fromkeys(groups):
                    group.wait_for_copies()
                with self.store.lent():
                    for part in self.whole.rounds:
                        own = [tensor.weight for tensor in part.own]
                        averages = self.ema.following(own, state) if self.ema else nullcontext()
                        with part.at_hand(gradients=True), self.store.state_at_hand(part.own), averages:
                            self._step_whole(part.own, multiplier)
                yield groups, True
            for batch in self.store.batches():
                if not batch and self.whole is not None:
                    continue  # the base has already stepped
                groups = [piece.group for piece in batch]
                for group in dict.fromkeys(groups):
                    group.wait_for_copies()
                self.store.borrow(batch)
                averages = self.ema.following([piece.weight for piece in batch], state) if self.ema else nullcontext()
                with averages:
                    rounded = self._step_flat(batch, multiplier)
                yield groups, self.store.give_back(batch, rounded)

    def _step_flat(self, pieces: Sequence[ShardPiece], multiplier: float) -> bool:
        """Step ``base`` on flat pieces; return whether it has also updated their 16-bit copies."""
        if isinstance(self.base, ShardOptimizer) and self.base.fuses:
            updates = [ShardUpdate(each.weight, each.reduced, each.rounded, each.opt_group) for each in pieces]
            self.base.step(updates=updates, multiplier=multiplier)
            return True
        for piece in pieces:
            piece.weight.grad = piece.gradient()
        with kept_in_place(piece.weight for piece in pieces):
            scaled_step(self.base, multiplier)
        for piece in pieces:
            piece.weight.grad = None
        return False

    def _step_whole(self, tensors: Sequence[WholeTensor], multiplier: float) -> None:
        """Step ``base`` on the tensors that this rank owns. Do nothing if it owns none, because an
        optimizer may fail without tensors."""
        if not tensors:
            return
        if isinstance(self.base, ShardOptimizer):
            updates = [ShardUpdate(each.weight, _gradient_of(each.weight), None, each.opt_group) for each in tensors]
            self.base.step(updates=updates, multiplier=multiplier)
        else:
            with kept_in_place(each.weight for each in tensors), without_empty_groups(self.base):
                scaled_step(self.base, multiplier)

    @property
    def train(self) -> Callable[[], None]:
        """Switch all parameters back to the training weights of a schedule-free optimizer, which
        evaluates with other weights than it trains: see :attr:`eval`."""
        return self._switch("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Switch all parameters to the evaluation weights of a schedule-free optimizer, until
        :attr:`train`. The call is collective over shard, between steps.

        Raises AttributeError if the optimizer has no such method, because trainers check with
        ``hasattr``.
        """
        return self._switch("eval")

    def _switch(self, mode: str) -> Callable[[], None]:
        switch = getattr(self.base, mode, None)
        if not callable(switch) or self._publisher is None:
            raise AttributeError(
                f"{type(self.base).__name__} has no {mode}(): only schedule-free optimizers have other weights for evaluation"
            )

        def call() -> None:
            with self._changing_masters(), kept_in_place(part.weight for part in self.state_by_tensor.parts):
                switch()

        return call

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Replace parameters and masters with the averages inside the block, and restore them
        bit-identically after it. See :meth:`Engine.ema_weights`."""
        if self.ema is None:
            raise TrialError(
                "this engine keeps no average of the weights",
                where="engine.ema_weights",
                fix='Add to ds_config: "ema": {"decay": 0.999}.',
            )
        if self.ema.swapped or not self.ema.steps:  # before the first step the average is the weights
            yield
            return
        self._swap(self.ema)
        before, failed = self._writes(), None
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:  # if the optimizer is closed, the module keeps the averages
            edited = not self._closed and self._swap(self.ema, before)
            if edited and (failed is None or isinstance(failed, Exception)):
                raise TrialError(
                    "weights were changed while the averages replace them: the averages have the change, and the weights do not",
                    where="engine.ema_weights",
                    got="an edit of parameters inside the block",
                    fix='Change weights outside of the block; to set an average, call safe_set_full_optimizer_state(param, value, "ema") '
                    "outside of it.",
                ) from failed

    def require_trained_weights(self, where: str) -> None:
        """Raise TrialError inside :meth:`ema_weights`."""
        if self.ema is not None:
            self.ema.require_trained_weights(where)

    def _swap(self, ema: WeightAverage, before: int | None = None) -> bool:
        """Swap weights and averages. Return whether any rank of the axis has edited parameters
        since :meth:`_writes` returned ``before``."""
        with self._changing_masters():
            edited = before is not None and self._writes() != before
            ema.swap([part.weight for part in self.state_by_tensor.parts], self.base.state)
        return edited if self._shard is None or ema.swapped else any(self._shard.gather_json(edited, "averages"))

    def _writes(self) -> int:
        """Count how often trained parameters were written or edited on this rank."""
        return sum(group.edits.writes + group.edits.count for group in self._groups if group.trainable)

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See :meth:`Engine.offload_states`."""
        where = "engine.offload_states"
        kinds = kinds_of(include, where)
        name = str(getattr(device, "value", device))
        if name != "cpu" or self._publisher is None:
            raise TrialError(
                "states can only be moved to host memory", where=where, got=f"device={name}", expected="cpu"
            )
        self.require_trained_weights(where)
        self._publisher.moved.move(kinds, self.base.state, pin=pin_memory, wait=not non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See :meth:`Engine.reload_states`."""
        if self._publisher is not None:
            self._publisher.moved.restore(wait=not non_blocking)

    @property
    def offloaded_states(self) -> frozenset[str]:
        """The kinds of state that :meth:`offload_states` has moved."""
        return self._publisher.moved.kinds if self._publisher is not None else frozenset()

    def devices_of(self, kind: Any) -> set[torch.device]:
        """Return where the states of a kind are now (DeepSpeed's ``get_state_devices``)."""
        (name,) = kinds_of([kind], "get_state_devices")
        return self._publisher.moved.devices(name, self.base.state) if self._publisher is not None else set()

    def close(self) -> None:
        """Free the store's offload space. No step may follow."""
        self._closed = True
        self.store.close()

    def bind_tensors(self, groups: Sequence[ParamGroup], sum_over_shards: Callable[[torch.Tensor], None]) -> None:
        """Give an optimizer with norms per tensor (LAMB), or with states in bf16, the
        elements of each piece that belong to each tensor.

        ``groups``: all of the model, the same on every rank, even if it lacks some pieces.
        """
        if isinstance(self.base, FusedLamb) and self.whole is None:
            names = sorted({slot.name for group in groups for slot in group.layout.slots})
            numbers = {name: index for index, name in enumerate(names)}
            self.base.bind(parts_by_weight(self.pieces, numbers.__getitem__), len(names), sum_over_shards)
        elif isinstance(self.base, FusedOptimizer) and self.base.states != "fp32":
            self.base.bind(parts_by_weight(self.pieces, seed_of))


def _gradient_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.grad if weight.grad is not None else torch.zeros_like(weight)
