"""A failing rank's last words, in the file in which torch.distributed.run looks for them: what it reports of the rank ends with them.

The form is that of torch's own ``@record`` (torch.distributed.elastic.multiprocessing.errors); without it the report says that there is
no traceback, whatever the rank has printed.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from zero_trial.mesh.env import launcher_error_file


def leave_last_words(text: str, *, printed: bool, path: str | None = None, now: float | None = None) -> None:
    """Once per rank: the first words are the cause. Nothing where no launcher asks for them.

    ``printed``: whether the log has them too. A file that cannot be written is nobody's concern: the log has the error.
    """
    place = launcher_error_file() if path is None else path
    if not place:
        return
    # torch reads the time as an integer and shows what is under "py_callstack".
    extra = {"py_callstack": text, "timestamp": str(int(time.time() if now is None else now))}
    content = {"message": {"message": text, "extraInfo": extra, "printed": printed}}
    with contextlib.suppress(OSError), Path(place).open("x", encoding="utf-8") as file:
        json.dump(content, file)
