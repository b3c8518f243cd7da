"""What a user reads when something is wrong."""

from __future__ import annotations

import pytest

from zero_trial import errors
from zero_trial.errors import ConfigError, MeshError, ZeroTrialError


def test_an_error_says_where_got_expected_fix() -> None:
    error = ConfigError(
        "not a size",
        where="zero_optimization.reduce_bucket_size",
        got='"5e8"',
        expected="elements",
        fix="Write 500000000.",
    )
    assert (
        str(error) == 'zero_optimization.reduce_bucket_size: not a size: got "5e8", expected elements. Write 500000000.'
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("no batch size is given"), "no batch size is given."),
        (ConfigError("did you mean stage?"), "did you mean stage?"),
        (ConfigError("bad value", got=0), "bad value: got 0."),
        (ConfigError("bad value", expected="1 or 2"), "bad value: expected 1 or 2."),
        (MeshError("late", where="rank 0"), "rank 0: late."),
    ],
)
def test_parts_may_be_left_out(error: ZeroTrialError, text: str) -> None:
    assert str(error) == text


def test_an_escape_sequence_in_a_name_is_written_out() -> None:
    error = ZeroTrialError("no such key\nmore", got="\x1b]0;title\x07red\r\x9b")
    assert str(error) == "no such key\nmore: got \\x1b]0;title\\x07red\\x0d\\x9b."


def test_all_faults_of_a_file_come_together() -> None:
    faults = [ConfigError("one", where="a"), ConfigError("two", where="b")]
    together = ConfigError.many(faults)
    assert str(together) == "2 faults:\n  a: one.\n  b: two."
    assert together.faults == tuple(faults)
    assert ConfigError.many(faults[:1]) is faults[0]


def test_exit_codes() -> None:
    codes = {
        kind.__name__: kind.exit_code for kind in (ConfigError, errors.InvalidHP, errors.DataError, errors.TrialError)
    }
    assert set(codes.values()) == {2}
    assert [
        errors.DoesNotFit.exit_code,
        errors.Diverged.exit_code,
        MeshError.exit_code,
        errors.Preempted.exit_code,
    ] == [3, 4, 5, 75]
