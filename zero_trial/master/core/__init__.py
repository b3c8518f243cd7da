"""The master without HTTP: events, lifecycles, search, scheduler and store."""

from zero_trial.master.core.master import Master

__all__ = ["Master"]
