"""One training step, built from the parts: the only package that depends on all of them."""

from zero_trial.engine.compat import RepeatingLoader, add_config_arguments
from zero_trial.engine.engine import Engine
from zero_trial.engine.start import initialize

__all__ = ["Engine", "RepeatingLoader", "add_config_arguments", "initialize"]
