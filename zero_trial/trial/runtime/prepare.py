"""The preparation of a trial under the embedded master:
``python -m zero_trial.trial.runtime.prepare`` with the options of
``determined.exec.prep_container``, which it runs.

Determined's own preparation gives up after about a minute without a master, and at once if the
connection breaks during some of its requests. A trial that trains asks for half an hour. So that a
trial survives a restart of the master at any moment, its preparation is repeated for as long.
"""

from __future__ import annotations

import runpy
import sys
import time

_SECONDS = 1800.0  # the retries of a core.Context take about as long
_PAUSE_SECONDS = 1.0


def main() -> None:
    """Prepare the trial. Raises what prep_container raises, once half an hour is over if the master
    cannot be reached."""
    from determined.common.api.errors import BadRequestException, MasterNotFoundException

    until = time.monotonic() + _SECONDS
    while True:
        try:
            runpy.run_module("determined.exec.prep_container", run_name="__main__", alter_sys=True)
            return
        except BadRequestException as error:
            # no connection, or one that broke; other subclasses are answers of the master
            if type(error) not in (BadRequestException, MasterNotFoundException) or time.monotonic() > until:
                raise
            sys.stderr.write(f"the master cannot be reached, so the preparation is repeated: {error}\n")
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
