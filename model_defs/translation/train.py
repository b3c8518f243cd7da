"""Train a task from words: ``python train.py task=nlp/translation trainer=deepspeed``; the same as
``zero-trial run``."""

from __future__ import annotations

import sys

from zero_trial.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
