"""Pipelines as data: schedules, the passes that add messages and sharding to them, and the simulator that proves them. All of it pure.

What runs a schedule on ranks (an executor, a pipeline engine) does not exist here yet.
"""

from __future__ import annotations
