"""A row of the table: one ds_config key, what it may be, what it is when nothing is said, and what it does here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zero_trial.schema.types import Opaque, Section, Type


class Support(Enum):
    """What zero_trial does with a key. Every known key has exactly one answer."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"  # read and checked; what it asks for does not exist in this design, or happens anyway
    NOT_YET = "no effect yet"  # only speed, memory or monitoring: the trained weights are the same without it
    REFUSED = "refused"  # asking for it is an error, because training would not be what was asked for
    MAPPED = "mapped"  # another spelling: turned into the key named in ``becomes``


class Origin(Enum):
    """Where a key comes from."""

    DEEPSPEED = "DeepSpeed 0.19.8"
    LEGACY = "older DeepSpeed"
    OURS = "zero_trial"


@dataclass(frozen=True)
class Key:
    """One row. ``path`` is dotted and canonical; ``says`` is the meaning, or the reason of the answer; ``instead`` is what to write.

    ``aliases`` are other last parts of the path that are equally valid; ``harmless`` are values that people write for "nothing" and that
    are read as if the key were not there; ``was`` is the default of older DeepSpeed where it changed.
    """

    path: str
    kind: Type
    answer: Support
    says: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    instead: str | None = None
    harmless: tuple[Any, ...] = ()
    becomes: str | None = None
    origin: Origin = Origin.DEEPSPEED
    was: str | None = None
    required: bool = False

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        return isinstance(self.kind, Section)

    def asks(self, value: Any) -> bool:
        """Whether ``value`` asks for what this key does: not the default, not harmless, and, for a section, something in it enabled."""
        if value is None or value == self.default or self.is_harmless(value):
            return False
        if isinstance(value, Mapping):
            return _enabled(value)
        return True

    def is_harmless(self, value: Any) -> bool:
        """Whether ``value`` is one that stands for nothing; False is not 0."""
        return any(type(value) is type(nothing) and value == nothing for nothing in self.harmless)


def _enabled(section: Mapping[str, Any]) -> bool:
    """A section asks for something unless it, or everything in it that can be switched, is switched off."""
    switches = [inner for key, inner in section.items() if key == "enabled"]
    if switches:
        return any(switch is not False for switch in switches)
    inner = [value for value in section.values() if isinstance(value, Mapping)]
    if inner:
        return any(_enabled(value) for value in inner)
    return bool(section)


def alike(section: str, answer: Support, says: str, **kinds: Type) -> tuple[Key, ...]:
    """Rows of one section that share answer and reason."""
    return tuple(Key(f"{section}.{name}", kind, answer, says) for name, kind in kinds.items())


def ignored(name: str, says: str) -> Key:
    """A row for an old section of which nothing is read."""
    return Key(name, Opaque(), Support.NO_EFFECT, says, origin=Origin.LEGACY)


def refused(
    name: str, says: str, instead: str = "Set enabled: false, or remove the section.", origin: Origin = Origin.LEGACY
) -> Key:
    """A row for a section that is refused where it is enabled: what is trained would not be what was asked for."""
    return Key(name, Opaque(), Support.REFUSED, says, instead=instead, origin=origin)
