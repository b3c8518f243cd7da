"""Declarations of ds_config keys: one line in a section creates both the field and the key's row in
the table.

    stage: int = supported(0, Int(0, 3), "0 shards nothing, 1 the optimizer state, ...")

Each function is named after the support for its keys. If no code reads the value of a key, declare
the key as a ``ClassVar``: it is checked and listed, but not stored in the section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from zero_trial.schema.types import Section, Type

DECLARED = "ds_config key"
"""Under this name a field's metadata holds its Key."""


class Support(Enum):
    """The support for a key. Every known key has exactly one level of support."""

    SUPPORTED = "supported"
    # read and checked; the feature does not exist in this design, or is always on
    NO_EFFECT = "no effect"
    # affects only speed, memory or monitoring: the trained weights are the same without it
    NOT_YET = "no effect yet"
    # an error, because ignoring the key would change the training result
    REFUSED = "refused"
    MAPPED = "mapped"  # another spelling: translated to the key in ``becomes``


class Origin(Enum):
    """The origin of a key."""

    DEEPSPEED = "DeepSpeed 0.19.8"
    LEGACY = "older DeepSpeed"
    OURS = "zero_trial"


@dataclass(frozen=True)
class Key:
    """One row of the table. ``path`` is dotted and canonical.

    Args:
        meaning: the key's effect, or the reason for its support level.
        instead: for a refused key, what to write instead.
        aliases: other valid spellings of the last part of the path.
        harmless: values that people write for "nothing"; treated as if the key were absent.
        becomes: for a mapped key, the current key.
        was: the default of older DeepSpeed, if it changed.
        section: for a section, the dataclass with its keys.
    """

    path: str
    type: Type
    support: Support
    meaning: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    instead: str | None = None
    harmless: tuple[Any, ...] = ()
    becomes: str | None = None
    origin: Origin = Origin.DEEPSPEED
    was: str | None = None
    required: bool = False
    section: Any = None

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        return isinstance(self.type, Section)

    def asks(self, value: Any) -> bool:
        """Return True if ``value`` enables this key's feature.

        Defaults, harmless values and sections in which everything is disabled enable nothing.
        """
        if value is None or value == self.default or self.is_harmless(value):
            return False
        if isinstance(value, Mapping):
            return _enabled(value)
        return True

    def is_harmless(self, value: Any) -> bool:
        """Return True if ``value`` means "nothing". False and 0 are different values."""
        return any(type(value) is type(nothing) and value == nothing for nothing in self.harmless)


def _declare(support: Support, default: Any, type: Type, meaning: str, **more: Any) -> Any:
    """Return the dataclass field of a key; the field stores the key's row."""
    metadata = {DECLARED: Key("", type, support, meaning, default, **more)}
    if more.get("required"):
        return dataclasses.field(metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


supported = partial(_declare, Support.SUPPORTED)
ours = partial(supported, origin=Origin.OURS)
no_effect = partial(_declare, Support.NO_EFFECT)
not_yet = partial(_declare, Support.NOT_YET)
refused = partial(_declare, Support.REFUSED)  # ``instead``: what to write
mapped = partial(_declare, Support.MAPPED, origin=Origin.LEGACY)  # ``becomes``: the current key


def section(
    cls: Any,
    meaning: str,
    *,
    optional: bool = False,
    switch: str | None = None,
    support: Support = Support.SUPPORTED,
    **more: Any,
) -> Any:
    """Declare a section with the keys of the dataclass ``cls``.

    If the section is absent, an ``optional`` section is None, any other a ``cls`` with defaults.
    ``switch``: the key that a bare true or false in place of the section sets.
    """
    row = Key("", Section(switch=switch), support, meaning, section=cls, **more)
    return dataclasses.field(default=None if optional else cls(), metadata={DECLARED: row})


def _enabled(section: Mapping[str, Any]) -> bool:
    """Return False if the section, or everything in it that has a switch, is disabled.

    In compression_training, ``shared_parameters`` holds the switch of a part; its groups have none.
    """
    shared = section.get("shared_parameters")
    if isinstance(shared, Mapping):
        return _enabled(shared)
    switches = [inner for key, inner in section.items() if key == "enabled"]
    if switches:
        return any(switch is not False for switch in switches)
    inner = [value for value in section.values() if isinstance(value, Mapping)]
    if inner:
        return any(_enabled(value) for value in inner)
    return bool(section)
