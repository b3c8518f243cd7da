"""The master's persistent state: one SQLite file, its schema and every query."""

from zero_trial.master.store.database import Database

__all__ = ["Database"]
