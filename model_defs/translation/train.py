"""Train this experiment with the command line of Lightning Transformers:
``python train.py task=nlp/translation dataset=nlp/translation/wmt16 trainer=deepspeed``.

Other words are those of ``zero-trial run``: ``trainer=PRESET`` and dotted keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from zero_trial.cli.main import main

FOLDER = Path(__file__).resolve().parent
EXPERIMENT = FOLDER.parents[1] / "experiments" / "translation" / "const.yaml"
TASK = "nlp/translation"


def settings(words: Iterable[str]) -> Iterator[str]:
    """Yield the words for ``zero-trial run``: ``dataset=`` becomes ``data.dataset=``. Another task
    stays as it is, and is refused there as an unknown key."""
    for word in words:
        if word.startswith(f"dataset={TASK}/"):
            yield f"data.dataset={word.removeprefix(f'dataset={TASK}/')}"
        elif word != f"task={TASK}":
            yield word


if __name__ == "__main__":
    sys.exit(main(["run", str(EXPERIMENT), str(FOLDER), *settings(sys.argv[1:])]))
