"""Learning-rate schedules: pure curves, a thin scheduler that steps along one, and the table of names."""

from zero_trial.engine.schedules.registry import build_scheduler
from zero_trial.engine.schedules.scheduler import CurveScheduler

__all__ = ["CurveScheduler", "build_scheduler"]
