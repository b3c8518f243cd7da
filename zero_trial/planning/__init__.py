"""Before a run: check the experiment, plan each rank's memory, and find the fastest ds_config that
fits.

Importing this package does not import torch.
"""

from __future__ import annotations
