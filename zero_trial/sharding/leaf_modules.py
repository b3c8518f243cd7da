"""Modules marked as leaves: at ZeRO stage 3, each is gathered and freed as a whole, whatever its
forward uses. Names and the marking attribute are DeepSpeed's, so a model that marks its own modules
for DeepSpeed is sharded in the same way here.

Use leaves for modules that select their parts by data, such as a mixture of experts, so that ranks
can use different parts. Set marks before ``initialize``, which refuses a list of such modules that
is in no leaf. The full parameters of a leaf are in memory together. ds_config's
``zero_optimization.leaf_module`` also sets marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.sharding.guards.freed import ShardedParameter, owner_of_param

_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark each module of the given classes as a leaf, and return these modules.

    Args:
        leaf_module_classes: classes, or their names with or without the Python module.
        raise_if_not_found: raise ConfigError if the model contains none of them.
    """
    return _by_class(model, leaf_module_classes, raise_if_not_found, leaf=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`, before ``initialize``; return the modules."""
    return _by_class(model, leaf_module_classes, raise_if_not_found, leaf=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (``flag=False``: unmark) the modules with the given dotted names. Return these modules,
    and the names that the model does not have. Raises ConfigError for such a name if
    ``raise_if_not_found``."""
    return _by_text(model, module_names, str.__eq__, "set_z3_leaf_modules_by_name", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (``flag=False``: unmark) the modules whose dotted names have one of the given suffixes.
    Return these modules, and the suffixes that match none. Raises ConfigError for such a suffix if
    ``raise_if_not_found``."""
    return _by_text(
        model, module_name_suffixes, str.endswith, "set_z3_leaf_modules_by_suffix", flag, raise_if_not_found
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark the given module."""
    mark_leaves([model], flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules in ``model`` that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the given module is marked as a leaf."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether an engine shards this parameter as a part of a leaf module."""
    owner = owner_of_param(model) if isinstance(model, ShardedParameter) else None
    leaves = get_z3_leaf_modules(owner.module) if owner is not None and owner.module is not None else []
    return any(inner is model for leaf in leaves for inner in leaf.parameters())


def _by_class(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], must_match: bool, *, leaf: bool
) -> list[nn.Module]:
    found = []
    for module in model.modules():
        kind = type(module)
        names = (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
        if any(entry in names if isinstance(entry, str) else isinstance(module, entry) for entry in classes):
            found.append(module)
    if not found and must_match:
        where = "set_z3_leaf_modules" if leaf else "unset_z3_leaf_modules"
        wanted = ", ".join(entry if isinstance(entry, str) else entry.__name__ for entry in classes)
        raise ConfigError(
            "the model has no module of these classes",
            where=where,
            got=wanted,
            fix="Name the class of a module in the model.",
        )
    mark_leaves(found, leaf)
    return found


def _by_text(
    model: nn.Module,
    texts: Sequence[str],
    matches: Callable[[str, str], bool],
    where: str,
    leaf: bool,
    must_match: bool,
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    of_text = {text: [module for name, module in modules.items() if matches(name, text)] for text in texts}
    missing = [text for text in texts if not of_text[text]]
    if missing and must_match:
        raise ConfigError(
            "the model has no module of this name",
            where=where,
            got=", ".join(map(repr, missing)),
            fix="model.named_modules() lists the names.",
        )
    found = list(dict.fromkeys(module for modules in of_text.values() for module in modules))
    mark_leaves(found, leaf)
    return found, missing


def mark_leaves(modules: Iterable[nn.Module], leaf: bool = True) -> None:
    """Mark or unmark these modules."""
    for module in modules:
        setattr(module, _MARK, leaf)
