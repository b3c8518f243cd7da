"""The master over HTTP: a `Master` answers requests of Determined's ``det`` command and harness.

``with listen(master, port=0) as server`` listens on loopback at ``server.url`` until the block
ends.
"""

from __future__ import annotations

from zero_trial.master.http.app import listen

__all__ = ["listen"]
