"""Makes ``import deepspeed`` mean zero_trial in a Python that sees ZERO_TRIAL_AS_DEEPSPEED.

Such a Python imports this when it starts, by the line that setup.py puts beside it. It stands apart
from the package and loads it at the first import of deepspeed: nothing else may cost time at the
start, and zero_trial looks at the main program when it is imported, which is not known yet.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing would cost as much as the rest of Python's start
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _Waiting:
    """A finder that gives its place to the stand-in's finder when that is needed."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        found: ModuleSpec | None = self._stand_in().find_spec(fullname, path, target)
        return found

    def find_distributions(self, context: Any) -> Iterable[Any]:
        found: Iterable[Any] = (
            self._stand_in().find_distributions(context) if context.name in (None, "deepspeed") else []
        )
        return found

    def _stand_in(self) -> Any:
        from zero_trial.compat.deepspeed.deepspeed_table import install_deepspeed

        finder = install_deepspeed()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return finder


sys.meta_path.insert(0, _Waiting())
