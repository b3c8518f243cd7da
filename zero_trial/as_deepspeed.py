"""``import zero_trial.as_deepspeed``: from here on ``import deepspeed`` means zero_trial.

ZERO_TRIAL_AS_DEEPSPEED=1 does the same for any process that imports zero_trial, which those under
``zero-trial launch`` and ``run`` do before the user's code. Where the real deepspeed is installed
this raises ConfigError, unless ZERO_TRIAL_AS_DEEPSPEED=replace asks for the stand-in by name.
"""

from __future__ import annotations

from zero_trial.stand_in.deepspeed_table import install_deepspeed

install_deepspeed().refuse_if_installed()
