"""The words of ds_config's ``pipeline`` section: schedules and policies by name, and what each can be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SCHEDULE_CHUNKS: Mapping[str, int | None] = MappingProxyType(
    {"1f1b": 1, "gpipe": 1, "interleaved": None, "looped_bfs": None, "zb_h1": 1, "zb_v": 2}
)
"""Schedule -> chunks per rank; None where they can be chosen."""

SCHEDULE_SYNONYMS: tuple[tuple[str, str], ...] = (
    ("zero_bubble", "zb_h1"),
    ("zbh1", "zb_h1"),
    ("zb-h1", "zb_h1"),
    ("zbv", "zb_v"),
    ("zb-v", "zb_v"),
    ("ZBVZeroBubble", "zb_v"),
    ("interleaved_1f1b", "interleaved"),
    ("Interleaved1F1B", "interleaved"),
    ("LoopedBFS", "looped_bfs"),
    ("breadth_first", "looped_bfs"),
)

LIFETIMES = ("hold", "chunk", "free")
"""Of gathered parameters."""

REDUCTIONS = ("boundary", "micro")
"""When gradients are reduced."""

ZERO_POLICIES = ("auto", *LIFETIMES, *REDUCTIONS)

RESHARDS: Mapping[str, str] = MappingProxyType({"step": "hold", "forward": "free"})
"""``zero_optimization.reshard_after`` in the words of a pipeline."""
