"""What importlib.metadata answers for a stand-in: libraries ask it for a version before they import
the package."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path


class StandInDistribution(Distribution):
    """A distribution without files: a name and a version."""

    def __init__(self, name: str, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: zero_trial's stand-in\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """Return METADATA or top_level.txt; None for any other file."""
        return self._files.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of the distribution would be: in this folder; there is none."""
        return Path(__file__).parent / path
