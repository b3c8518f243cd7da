"""How a ds_config key is declared: one line in its section, which makes the field and its row in
the table.

    stage: int = supported(0, Int(0, 3), "0 shards nothing, 1 the optimizer state, ...")

The functions are named after what zero_trial does with the key. A key whose value nothing reads is
declared as a ``ClassVar``: it is checked and listed, and the section does not keep it.
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
    """What zero_trial does with a key. Every known key has exactly one of these."""

    SUPPORTED = "supported"
    # read and checked; what it asks for does not exist in this design, or happens anyway
    NO_EFFECT = "no effect"
    # only speed, memory or monitoring: the trained weights are the same without it
    NOT_YET = "no effect yet"
    # asking for it is an error, because training would not be what was asked for
    REFUSED = "refused"
    MAPPED = "mapped"  # another spelling: turned into the key named in ``becomes``


class Origin(Enum):
    """Where a key comes from."""

    DEEPSPEED = "DeepSpeed 0.19.8"
    LEGACY = "older DeepSpeed"
    OURS = "zero_trial"


@dataclass(frozen=True)
class Key:
    """One row of the table. ``path`` is dotted and canonical.

    Args:
        meaning: what the key does, or the reason for its support.
        instead: for a refused key, what to write.
        aliases: other last parts of the path that are equally valid.
        harmless: values that people write for "nothing"; they are read as if the key were absent.
        becomes: for a mapped key, the key of today.
        was: the default of older DeepSpeed where it changed.
        section: for a section, the dataclass that declares its keys.
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
        """Return True if ``value`` asks for what this key does.

        A default, a harmless value and a section in which everything is switched off ask for
        nothing.
        """
        if value is None or value == self.default or self.is_harmless(value):
            return False
        if isinstance(value, Mapping):
            return _enabled(value)
        return True

    def is_harmless(self, value: Any) -> bool:
        """Return True if ``value`` stands for nothing. False is not 0."""
        return any(type(value) is type(nothing) and value == nothing for nothing in self.harmless)


def _declare(support: Support, default: Any, type: Type, meaning: str, **more: Any) -> Any:
    """Return the field of a key, which holds its row."""
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
refused = partial(_declare, Support.REFUSED)  # ``instead`` says what to write
mapped = partial(_declare, Support.MAPPED, origin=Origin.LEGACY)  # ``becomes`` is the key of today


def section(
    cls: Any,
    meaning: str,
    *,
    optional: bool = False,
    switch: str | None = None,
    support: Support = Support.SUPPORTED,
    **more: Any,
) -> Any:
    """Declare a section whose keys are those of the dataclass ``cls``.

    ``optional``: None where it is not written, else a ``cls`` with all defaults. ``switch``: a bare
    true or false stands for the section with this key set.
    """
    row = Key("", Section(switch=switch), support, meaning, section=cls, **more)
    return dataclasses.field(default=None if optional else cls(), metadata={DECLARED: row})


def _enabled(section: Mapping[str, Any]) -> bool:
    """Return False if the section, or everything in it that has a switch, is switched off.

    ``shared_parameters`` hold the switch of a part of compression_training, whose groups have none.
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
