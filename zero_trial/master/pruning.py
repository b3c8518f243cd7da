"""Whether a trial's ds_config can be reconciled at all, told before the trial is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reason(config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]) -> str | None:
    """One line that says why ``hparams`` cannot be trained, or None. ``config`` is a completed experiment config; ``files`` is the context
    directory (path -> content), in which ``data.ds_config`` may name a file. Pure.
    """
    raise NotImplementedError
