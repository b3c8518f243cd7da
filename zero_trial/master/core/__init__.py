"""The master without HTTP: events come in, the lifecycles, the search and the scheduler decide what
follows, and it is stored and carried out."""

from zero_trial.master.core.master import Master

__all__ = ["Master"]
