"""Keys of the data file: each is a row of the table that says what happens and why."""

from __future__ import annotations

import json
from pathlib import Path

from zero_trial.ds_config import inert_keys
from zero_trial.ds_config.key import Support
from zero_trial.ds_config.table import FIELDS, TABLE

FILE = Path(inert_keys.__file__).with_suffix(".json")


def test_every_entry_is_a_row_that_no_code_reads() -> None:
    for section, entries in json.loads(FILE.read_text()).items():
        for name in entries:
            path = f"{section}.{name}" if section else name
            row = TABLE[path]
            assert row.meaning and path not in FIELDS
            assert row.support in (Support.NO_EFFECT, Support.NOT_YET, Support.REFUSED)
            assert (row.instead is not None) or row.support is not Support.REFUSED, path
