"""One training step, wired from the parts: the only room that knows all of them."""

from zero_trial.engine.arguments import add_config_arguments
from zero_trial.engine.data import RepeatingLoader
from zero_trial.engine.engine import Engine
from zero_trial.engine.initialize import initialize

__all__ = ["Engine", "RepeatingLoader", "add_config_arguments", "initialize"]
