"""Before a run: check the experiment, and plan each rank's memory with a dry run.

Importing it loads no torch.
"""

from __future__ import annotations
