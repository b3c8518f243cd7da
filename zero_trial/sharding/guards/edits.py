"""Detects changes of parameters by user code outside of the optimizer: edits in place (also of
``param.data``, see :class:`WatchedParameter`), replaced values (``param.data = new``), and views
that it keeps.

An edit changes the tensor's version, a replacement its address; cost: a check of both per step and
parameter. Kept views increase the reference count of the memory; cost: two counts per gather.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from zero_trial.sharding.guards.freed import unasked
from zero_trial.sharding.layout import Layout

_VERSION = operator.attrgetter("_version")


class EditWatch:
    """Detects edits of the parameters of one group, which separate masters and shards do not see.

    Args:
        params: ``params[i]`` is the tensor of ``layout.slots[i]``.
        views: the parameters' places in the group's full buffer.
        always: whether the parameters always live.
        real: whether tensors have memory, unlike in a dry run.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor],
        *,
        always: bool,
        real: bool,
    ) -> None:
        self._layout = layout
        self._params, self._views = params, views
        self._always, self._real = always, real
        self._hidden = 0  # offset of the versions while the values are freed
        self._known = self._versions()  # versions after the last accepted edits
        self.writes = 0  # how often the engine has written the parameters
        self._addresses = self._addresses_of_views()
        self.count = 0  # accepted edits
        self._elsewhere: list[torch.Tensor] = []  # the parameters' data while their memory is moved away

    def accept(self, *, undone: bool = False) -> None:
        """Mark all edits up to now as handled: the caller applies, has made or has ``undone``
        them."""
        versions = self._versions()
        self.count += versions != self._known and not undone
        self._known = versions

    def count_step(self) -> None:
        """Make a graph from before the step, which needs the old values, fail in its backward pass
        as in plain torch: autograd does not see that publication writes the values. Cost: 0.1
        microseconds per parameter."""
        increment_version(self._params)
        self._known = [known + 1 for known in self._known]

    def hide(self) -> None:
        """Make a backward pass that would read freed values raise autograd's error about modified
        values instead of crashing the process, until :meth:`show`."""
        increment_version(self._params)
        self._hidden = 1

    def show(self) -> None:
        """Allow backward passes to read the values, which have been gathered again."""
        if self._hidden:
            self._hidden = 0
            versions = [param._version - 1 for param in self._params]
            torch._C._autograd._unsafe_set_version_counter(tuple(self._params), tuple(versions))

    # --- what user code did -----------------------------------------------------------------------

    def edited(self, *, whole: bool) -> bool:
        """Return whether parameters were edited in place since :meth:`accept`, or replaced, which
        can only be detected while they are ``whole`` (unsharded)."""
        if whole:
            self.note_replaced()
        return self._versions() != self._known

    def names(self, *, whole: bool) -> list[str]:
        """Return the names of parameters that were edited or replaced on this rank, and accept the
        edits. Local."""
        if not self.edited(whole=whole):
            return []
        pairs = zip(self._versions(), self._known, strict=True)
        found = [slot.name for slot, (now, before) in zip(self._layout.slots, pairs, strict=True) if now != before]
        self.accept()
        return found

    def note_replaced(self) -> list[int]:
        """List the unsharded parameters whose ``data`` user code replaced; these count as edits."""
        if not self._real or self._elsewhere:
            return []
        own, now = self._addresses or _addresses(self._views), _addresses(self._params)
        found = [] if now == own else [index for index in range(len(own)) if now[index] != own[index]]
        for index in found:
            self._known[index] = -1
        return found

    def _versions(self) -> list[int]:
        with unasked():
            versions = list(map(_VERSION, self._params))
        return [version - 1 for version in versions] if self._hidden else versions

    def went_away(self, host: torch.UntypedStorage) -> None:
        """Make the parameters views of ``host``, the full buffer's copy."""
        for view in self._views:
            place = (host, view.storage_offset(), view.size(), view.stride())
            self._elsewhere.append(torch.empty(0, dtype=view.dtype).set_(*place))
        for param, copy in zip(self._params, self._elsewhere, strict=True):
            param.data = copy

    def came_back(self) -> None:
        """Make the parameters views of the full buffer again, which has been filled again. A
        parameter whose ``data`` user code replaced meanwhile keeps the new values, on its device,
        for :func:`take_replaced`."""
        if not self._elsewhere:
            return
        for param, copy, view in zip(self._params, self._elsewhere, self._views, strict=True):
            param.data = view if param.data_ptr() == copy.data_ptr() else param.detach().to(view.device)
        self._addresses = self._addresses_of_views()
        self._elsewhere.clear()

    def _addresses_of_views(self) -> list[int]:
        return _addresses(self._views) if self._always and self._real else []


class KeptViews:
    """Detects views of a group's memory that user code still holds when the memory is to be freed,
    such as a forward hook's ``weight.detach()``.

    The reference count of the memory includes views that autograd has saved. These may lose the
    memory, because backward gathers it first (and so may views that the context of an
    autograd.Function stores as attributes, as bitsandbytes does). Reading any other view would
    crash the process. To distinguish the two, Python's garbage collector must visit every object.
    This is done once for each number of references that a use of the parameters has added, and the
    result is cached: a model that does the same in every step pays only in the first step. (Not
    detected: a use saves fewer views for backward while user code keeps as many more.)

    Args:
        own: the tensors in that memory that the group itself holds. No others may exist yet.
    """

    def __init__(self, own: Sequence[torch.Tensor], *, real: bool) -> None:
        self._own, self._real = own, real
        self._before = self._alone = self._users()
        self._known: dict[tuple[int, bool, bool], bool] = {}
        self._collections: int | None = None  # of garbage, up to the first use; None before it

    def begin(self) -> None:
        """Record the reference count before the parameters are used."""
        self._before = self._users()
        if self._collections is None:
            self._collections = _collections()

    def exist(self) -> bool:
        """Return whether user code or autograd holds views."""
        return self._users() > self._alone

    def held(self) -> bool:
        """Return whether user code holds views after a use of the parameters. Local.

        Returns True before the first use, when the engine itself holds views to write first values
        to their home; this result is not cached.
        """
        if self._collections is None:
            return True
        use = (self._users() - self._before, torch.is_grad_enabled(), torch._C._current_graph_task_id() != -1)
        if use not in self._known:
            self._known[use] = self._found()
        return self._known[use]

    def _users(self) -> int:
        return torch._C._storage_Use_Count(_storage(self._own[0])) if self._real else 0

    def _found(self) -> bool:
        memory, own = _storage(self._own[0]), set(map(id, self._own))
        # Objects created since the first use are in the youngest generation, unless the garbage
        # collector has run since.
        young = _collections() == self._collections
        with torch._C.DisableTorchFunctionSubclass():
            objects = gc.get_objects(0 if young else None)
            views = [
                each
                for each in objects
                if issubclass(type(each), torch.Tensor) and id(each) not in own and _storage(each) == memory
            ]
        contexts = [each for each in objects if issubclass(type(each), BackwardCFunction)]
        by_autograd = Counter(id(value) for each in contexts for value in tree_leaves(list(vars(each).values())))
        del objects, contexts
        probe = [object()]
        unheld = sys.getrefcount(probe[0])
        # A tensor that C++ code (autograd) also references counts once more.
        return any(
            sys.getrefcount(views[i]) > unheld + (views[i]._use_count() > 1) + by_autograd[id(views[i])]
            for i in range(len(views))
        )


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or inside a transform of torch.func
        return 0


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
