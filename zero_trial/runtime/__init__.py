"""What surrounds a trial: metrics, checkpoints, preemption, search and the ranks, as small protocols with several
forms.
"""

from __future__ import annotations
