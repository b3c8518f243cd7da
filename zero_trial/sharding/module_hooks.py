"""Hooks on a user's modules that survive users' operations on these: deep copies, pickles,
``module.compile()``.

    ModuleHook      does nothing in a copy of the module
    UntracedHook    is called by torch.compile, and not traced
    AroundForward   a hook before and one after the call of a module, outside of its compiled call
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

_GATHERED_HERE = (
    "zero_trial gathers this block's parameters here (ZeRO stage 3), which a graph cannot contain: compile the blocks with fullgraph=True, or "
    "the whole model without it"
)


class ModuleHook:
    """A hook on a user's module that does nothing in a deep copy of that module.

    ``copy.deepcopy(engine.module)`` (an EMA, a frozen reference model) is then an ordinary module,
    which reaches neither the engine's process groups nor its shards; so is what
    ``torch.save(engine.module)`` writes.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_nothing,)


class UntracedHook(ModuleHook):
    """A hook that torch.compile calls and does not trace: the graph breaks there."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    # What torch.compiler.disable sets, without its import of all of torch.compile.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = _GATHERED_HERE  # type: ignore[attr-defined]


def keep_out_of_graphs() -> None:
    """Run the hooks, and all that they call, without torch.compile from now on."""
    if not hasattr(UntracedHook.__call__, "_torchdynamo_disable_recursive"):
        torch.compiler.disable(UntracedHook, reason=_GATHERED_HERE)


class AroundForward:
    """Two hooks around the call of a module.

    ``module.compile()`` compiles the call with the module's hooks in it. These two then go outside
    of the compiled call, so that the block is one graph (``fullgraph=True``), whether it is
    compiled before or after this. The module's ``compile`` is replaced then: compiling again would
    replace the call that has the hooks.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._module, self._before, self._after = module, before, after
        self._compiled: Callable[..., Any] | None = None
        self._handles = [
            module.register_forward_pre_hook(UntracedHook(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(UntracedHook(after), with_kwargs=True),
        ]
        if module._compiled_call_impl is not None:
            self.follow_compiler()

    def follow_compiler(self) -> None:
        """Move outside of the module's compiled call, from its next call on."""
        if self._compiled is not None:
            return
        keep_out_of_graphs()
        for handle in self._handles:
            handle.remove()
        self._go_outside()
        vars(self._module)["compile"] = _CompileAgain(self._module, self._go_outside)

    def _go_outside(self) -> None:
        self._compiled = self._module._compiled_call_impl
        self._module._compiled_call_impl = UntracedHook(self._call_compiled)

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._module, args, kwargs)
        output = self._compiled(*args, **kwargs)  # type: ignore[misc]
        self._after(self._module, args, kwargs, output)
        return output

    def remove(self) -> None:
        """Remove both hooks; a compiled call stays."""
        for handle in self._handles:
            handle.remove()
        if self._compiled is not None:
            self._module._compiled_call_impl = self._compiled
            self._compiled = None
            vars(self._module).pop("compile", None)


class _CompileAgain:
    """``module.compile`` of a module whose hooks are outside of its compiled call; in a deep copy
    of the module it is the class's own."""

    def __init__(self, module: nn.Module, after: Callable[[], None]) -> None:
        self._module, self._after = module, after

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self._module).compile(self._module, *args, **kwargs)
        self._after()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo[id(self._module)]
        return MethodType(type(copied).compile, copied)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a hook in a copy."""
