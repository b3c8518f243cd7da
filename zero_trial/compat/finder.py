"""A finder on ``sys.meta_path`` that builds a package from a table of names.

    "deepspeed.pipe": {"PipelineModule": "zero_trial.pipeline:PipelineModule"}    module: name: ours
    "deepspeed.moe": Refused("there is no mixture of experts here ...")           a refused module
    "deepspeed": {"checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing"}
                                                                      without a colon: a module

A name is resolved on first use. A refused or unlisted name raises AttributeError as an attribute
and ImportError in ``from ... import``, so hasattr and ``except ImportError`` work as with the
original package. Both errors contain the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_trial.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder


class Refused(NamedTuple):
    """A name that zero_trial does not provide: the reason, and the alternative."""

    reason: str


Table = Mapping[str, "Mapping[str, str | Refused] | Refused"]
"""Module -> name -> "module:attribute", a module, or Refused; a Refused module includes all of its
submodules."""


class StandIn(NamedTuple):
    """A package that replaces another project's.

    Args:
        top: the package's name.
        version: the project's version that the table describes, also for importlib.metadata; if
            empty, importlib.metadata does not find the package.
        table: the names.
        replace: whether to replace the project itself if it is installed.
        how_to_replace: the fix in the error if the project is installed.
    """

    top: str
    version: str
    table: Table
    replace: bool = False
    how_to_replace: str = ""

    def ours(self, module: str) -> dict[str, str]:
        """Return the provided names of ``module``, with their targets."""
        names = self.table.get(module, {})
        return {} if isinstance(names, Refused) else {k: v for k, v in names.items() if isinstance(v, str)}

    def submodules(self, module: str) -> list[str]:
        """Return the names of the modules directly under ``module`` that can be imported."""
        under = [name[len(module) + 1 :] for name in self.modules() if name.startswith(f"{module}.")]
        return sorted({name.partition(".")[0] for name in under})

    def modules(self) -> list[str]:
        """Return the modules that can be imported: all modules in the table that are not refused,
        their parents, and parents of refused modules that are not refused themselves, so that
        importing a refused module raises its own reason."""
        answered, above_refused = {self.top}, set()
        for name, names in self.table.items():
            parts = name.split(".")
            parents = {".".join(parts[:end]) for end in range(1, len(parts))}
            if isinstance(names, Refused):
                above_refused |= parents
            else:
                answered |= {name, *parents}
        return sorted(answered | {name for name in above_refused if not isinstance(self.table.get(name), Refused)})

    def refusal(self, module: str, name: str) -> str:
        """Return why ``module.name`` is not available: its reason, or the nearest listed names."""
        asked = f"{module}.{name}"
        reason = self.reason(module, name)
        if reason is not None:
            return f"{asked} is refused by zero_trial's stand-in: {reason}"
        of = f"{self.top} {self.version}".rstrip()
        return f"{asked} is not in zero_trial's stand-in for {of}{self._nearest(module, name)}"

    def reason(self, module: str, name: str) -> str | None:
        """Return why ``module.name`` is refused; None if it is provided or not listed."""
        parts = [*module.split("."), name]
        for end in range(len(parts), 0, -1):
            names = self.table.get(".".join(parts[:end]), {})
            if isinstance(names, Refused):
                return names.reason
            target = names.get(parts[end]) if end < len(parts) else None
            if target is not None:
                return target.reason if isinstance(target, Refused) else None
        return None

    def _nearest(self, module: str, name: str) -> str:
        """Return "did you mean" with the listed name of the nearest path; "" if none is near."""
        import difflib

        listed = [f"{place}.{known}" for place in self.modules() for known in self.ours(place)]
        near = difflib.get_close_matches(f"{module}.{name}", [*listed, *self.modules()], 1, 0.8)
        return f". Did you mean {near[0]}?" if near else ""


class StandInModule(ModuleType):
    """A module with the names of a table."""

    def __init__(self, name: str, stand_in: StandIn) -> None:
        super().__init__(name, f"zero_trial's stand-in for {name}")
        self.__dict__["_stand_in"] = stand_in
        self.__all__ = sorted(stand_in.ours(name))

    def __getattr__(self, name: str) -> Any:
        stand_in = self.__dict__["_stand_in"]
        target = stand_in.ours(self.__name__).get(name)
        if target is None:
            if name in stand_in.submodules(self.__name__):
                return import_module(f"{self.__name__}.{name}")
            if name.startswith("__"):
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            raise AttributeError(stand_in.refusal(self.__name__, name))
        place, _, attribute = target.partition(":")
        value: Any = import_module(place)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name, except that an imported submodule must not hide a listed name."""
        if not (isinstance(value, StandInModule) and name in self._stand_in.ours(self.__name__)):
            super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*self.__dict__, *self.__all__, *self._stand_in.submodules(self.__name__)})


class StandInFinder(MetaPathFinder, Loader):
    """Finds and creates the modules of a StandIn, and its distribution for importlib.metadata."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._checked = stand_in.replace

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the package. An import also gets the spec of a refused or
        unlisted module, whose creation raises the reason. Raises ConfigError if the project itself
        is installed."""
        top = self.stand_in.top
        if fullname != top and not fullname.startswith(f"{top}."):
            return None
        if not self._checked:
            self.refuse_if_installed()
            self._checked = True
        # importlib.util.find_spec only checks for a module, but calls this like an import
        asks = sys._getframe(2).f_globals.get("__name__") == "importlib.util"
        if asks and fullname not in self.stand_in.modules():
            return None
        return ModuleSpec(fullname, self, origin="zero_trial.compat.deepspeed", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module. Raises ImportError if it is refused or not listed."""
        if spec.name not in self.stand_in.modules():
            module, _, name = spec.name.rpartition(".")
            raise ImportError(self.stand_in.refusal(module, name), name=spec.name)
        return StandInModule(spec.name, self.stand_in)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved on first use."""

    def refuse_if_installed(self) -> None:
        """Raise ConfigError if the project itself can be imported, or already has been."""
        top = self.stand_in.top
        loaded = sys.modules.get(top)
        if loaded is not None and not isinstance(loaded, StandInModule):
            raise ConfigError(
                f"the real {top} was imported before its stand-in",
                where="sys.modules",
                got=str(getattr(loaded, "__file__", loaded)),
                fix=f"Import zero_trial.as_{top} before any module that imports {top}.",
            )
        if self.stand_in.replace:
            return
        for finder in list(sys.meta_path):  # a copy: zero_trial_start's finder removes itself
            spec = None if isinstance(finder, StandInFinder) else finder.find_spec(top, None, None)
            if spec is None or isinstance(spec.loader, StandInFinder):
                continue
            if spec.origin is not None:  # None for a plain folder of that name
                raise ConfigError(
                    f"the real {top} is installed, and its stand-in replaces it only on request",
                    where=f"import {top}",
                    got=spec.origin,
                    expected=f"only zero_trial's stand-in for {top}",
                    fix=self.stand_in.how_to_replace,
                )

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the package's distribution, if the search is on this Python's own path."""
        named = context.name is None or context.name.lower().replace("_", "-") == self.stand_in.top
        if not self.stand_in.version or not named or context.path is not sys.path:
            return []
        return [distribution_of(self.stand_in.top, self.stand_in.version)]


def distribution_of(name: str, version: str) -> Distribution:
    """Return a distribution for importlib.metadata, with name and version but no files. Libraries
    check the version before they import the package."""
    from importlib.metadata import Distribution  # imported only when needed

    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: zero_trial's stand-in\n",
        "top_level.txt": f"{name}\n",
    }

    class StandInDistribution(Distribution):
        def read_text(self, filename: str) -> str | None:
            return files.get(filename)

        def locate_file(self, path: str | PathLike[str]) -> Path:
            return Path(__file__).parent / path  # does not exist

    return StandInDistribution()


def install(stand_in: StandIn) -> StandInFinder:
    """Insert the stand-in before the other finders and return its finder. Keeps an installed one,
    unless only the new one may replace the project."""
    for finder in sys.meta_path:
        if isinstance(finder, StandInFinder) and finder.stand_in.top == stand_in.top:
            if finder.stand_in.replace or not stand_in.replace:
                return finder
            sys.meta_path.remove(finder)
            break
    made = StandInFinder(stand_in)
    sys.meta_path.insert(0, made)
    return made
