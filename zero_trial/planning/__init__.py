"""Before a run: check the experiment, plan each rank's memory, and find the fastest ds_config that
fits.

Importing it loads no torch.
"""

from __future__ import annotations
