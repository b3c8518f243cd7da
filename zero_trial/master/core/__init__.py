"""The master without HTTP: lifecycles, search and scheduler decide how to react to each event; the
decision is stored and then carried out."""

from zero_trial.master.core.master import Master

__all__ = ["Master"]
