"""The master's verbs: events come in, the lifecycles, the search and the scheduler say what follows, and it is written down and done."""

from zero_trial.master.core.cluster import Master

__all__ = ["Master"]
