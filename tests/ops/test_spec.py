"""The structs of scalars: right numbers in the right places. That they equal the CPU's bit for bit
is tested with the kernels."""

from __future__ import annotations

import struct

import pytest

from zero_trial.ops.spec import ADAGRAD, ADAM, LION, SGD, pack_floats


def test_adam() -> None:
    got = struct.unpack("8f", ADAM.pack(0.1, 0.9, 0.99, 1e-8, 0.5, 2.0, 3.0, True))
    want = (3.0, 0.1, 0.01, 0.1 / (1 - 0.81), 1 / (1 - 0.99**2) ** 0.5, 1e-8, 0.0, 0.05)
    assert got == pytest.approx(want, rel=1e-6)
    assert struct.unpack("8f", ADAM.pack(0.1, 0.9, 0.99, 1e-8, 0.5, 2.0, 3.0, False))[6:] == (0.5, 0.0)


def test_the_others() -> None:
    assert struct.unpack("5f", LION.pack(0.5, 0.75, 0.5, 0.25, 2.0)) == (2.0, 0.25, 0.5, 0.5, 0.125)
    assert struct.unpack("4f", ADAGRAD.pack(0.5, 0.25, 0.125, 2.0)) == (2.0, 0.5, 0.25, 0.125)


def test_sgd_starts_with_the_whole_gradient() -> None:
    first = struct.unpack("7f", SGD.pack(0.5, 0.75, 0.25, 0.125, True, True, 2.0))
    later = struct.unpack("7f", SGD.pack(0.5, 0.75, 0.25, 0.125, False, False, 2.0))
    assert first == (2.0, 0.5, 0.125, 0.0, 1.0, 0.75, 0.0)
    assert later == (2.0, 0.5, 0.125, 0.75, 0.75, 0.75, 1.0)


def test_what_is_too_large_for_fp32_is_infinite_as_in_c() -> None:
    values = (1e39, -1e39, 3.4028235e38, 0.1)
    assert struct.unpack("4f", pack_floats(values)) == pytest.approx((float("inf"), -float("inf"), 3.4028235e38, 0.1))
