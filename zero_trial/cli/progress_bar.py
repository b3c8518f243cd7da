"""A bar of bytes for what takes long on big files; nothing where nobody watches."""

from __future__ import annotations

import sys
from typing import Any

from zero_trial.launch.screen import is_terminal


def bytes_bar(word: str, total: int, *, quiet: bool = False) -> Any:
    """A tqdm bar on stderr that goes away when it is closed. ``update(bytes)`` moves it."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        disable=quiet or not is_terminal(sys.stderr),
        file=sys.stderr,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        leave=False,
        ascii=".#",
        bar_format=f"{word:<8}" + "{n_fmt}B/{total_fmt}B |{bar:24}| {rate_fmt}  eta {remaining}",
    )
