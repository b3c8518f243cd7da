"""``Trainer(strategy=ZeroTrialStrategy(stage=3))``: Lightning's Trainer on a zero_trial engine."""

from zero_trial.compat.lightning_strategy import ZeroTrialStrategy

__all__ = ["ZeroTrialStrategy"]
