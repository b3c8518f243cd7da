"""Tensors of a call that share memory are found, and both are named."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cuda_cases import STEPS
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import ConfigError
from zero_trial.ops import arguments
from zero_trial.ops.arguments import Interval, check
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial

NAMES = ("parameter", "gradient", "state", "second state", "rounded copy")


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(5), 2)))
def test_both_are_named(emulator: Emulator, first: int, second: int) -> None:
    """One element in common is enough."""
    n, room = 10, torch.zeros(100)
    tensors = [torch.zeros(n) for _ in range(5)]
    tensors[first], tensors[second] = room[20 : 20 + n], room[11 : 11 + n]
    low = [x.bfloat16() if k == 4 and x.untyped_storage().nbytes() < 400 else x for k, x in enumerate(tensors)]
    for adam_, tried in ((CUDA["adam_"], tensors), *(((ops.adam_, low),) if second < 4 else ())):
        with pytest.raises(ConfigError) as said:
            adam_(*tried, None, *STEPS["adam_"](1, 1.0))
        assert f"the {NAMES[second]} and the {NAMES[first]} overlap" in str(said.value)
    tensors[second] = room[10 : 10 + n]
    with emulator.watching(*tensors):
        CUDA["adam_"](*tensors, None, *STEPS["adam_"](1, 1.0))


def test_a_view_of_another_dtype_is_seen(emulator: Emulator) -> None:
    room = torch.zeros(16)
    low = room.view(torch.bfloat16)
    p, m, v = room[:8], torch.zeros(8), torch.zeros(8)
    with pytest.raises(ConfigError, match="the parameter and the gradient overlap"):
        CUDA["adam_"](p, low[15:23], m, v, None, None, *STEPS["adam_"](1, 1.0))
    with emulator.watching(room, m, v):
        CUDA["adam_"](p, low[16:24], m, v, None, None, *STEPS["adam_"](1, 1.0))


def test_tensors_of_one_launch_are_held_against_each_other(emulator: Emulator) -> None:
    room, columns = torch.zeros(60), [[x] * 3 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0)]
    p = [room[0:10], room[20:30], room[29:40]]
    g, m, v = ([torch.zeros(len(x)) for x in p] for _ in range(3))
    with pytest.raises(ConfigError, match="the parameter number 1 and the parameter number 2 overlap"):
        CUDA["adam_many_"](p, g, m, v, [], None, None, *columns, 1.0, True)
    with pytest.raises(ConfigError, match="the parameter number 1 and the parameter number 2 overlap"):
        CUDA["lamb_apply_"](p, m, v, [], None, torch.ones(3), *columns, True)
    m[0] = v[2][:10]
    with pytest.raises(ConfigError, match="the state number 0 and the second state number 2 overlap"):
        CUDA["lamb_moments_"](p, g, m, v, None, None, *columns[1:], 1.0, True)


def test_lamb_of_the_cpu(emulator: Emulator) -> None:
    room, columns = torch.zeros(40), [[x] for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0)]
    with pytest.raises(ConfigError, match="the state and the second state overlap"):
        ops.lamb_moments_(
            [room[:10]], [torch.ones(10)], [room[10:20]], [room[19:29]], None, None, *columns[1:], 1.0, True
        )
    with pytest.raises(ConfigError, match="the parameter and the rounded copy overlap"):
        low = room.view(torch.bfloat16)[8:18]
        ops.lamb_apply_([room[:10]], [room[10:20]], [room[20:30]], [low], None, torch.ones(1), *columns, True)


def test_what_is_only_read_may_be_shared(emulator: Emulator) -> None:
    """One gradient for two parameters; LAMB's first pass does not write parameters."""
    g, columns = torch.ones(10), [[x] * 2 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0)]
    p, m, v = ([torch.ones(10) for _ in range(2)] for _ in range(3))
    with emulator.watching(*p, *m, *v, read_only=[g]):
        CUDA["adam_many_"](p, [g, g], m, v, [], None, None, *columns, 1.0, True)
        CUDA["lamb_moments_"]([p[0], p[0]], [g, g], m, v, None, None, *columns[1:], 1.0, True)


def test_copies(emulator: Emulator) -> None:
    room = torch.zeros(40)
    with emulator.watching(room):
        CUDA["add_many_"]([room[:10]], [room[:10]])  # a buffer may be its own source
        CUDA["copy_many_"]([room[:10]], [room[10:20]])
    with pytest.raises(ConfigError, match="the target number 0 and the source number 0 overlap"):
        CUDA["copy_many_"]([room[:10]], [room[9:19]])
    with pytest.raises(ConfigError, match="the target number 0 and the target number 1 overlap"):
        CUDA["copy_many_"]([room[:10], room[5:15]], [room[20:30], room[30:40]])
    with pytest.raises(ConfigError, match="overlap"):
        CUDA["copy_many_"]([room.view(torch.bfloat16)[:10]], [room[:10]])


intervals = st.builds(
    lambda start, length, written: (start, start + length, written, f"{start}"),
    *(st.integers(1, 40), st.integers(1, 9), st.booleans()),
)


@given(st.lists(intervals, max_size=7))
def test_as_by_comparing_all_pairs(found: list[Interval]) -> None:
    wanted = any(a[0] < b[1] and b[0] < a[1] and (a[2] or b[2]) for i, a in enumerate(found) for b in found[:i])
    try:
        check(found)
    except ConfigError:
        assert wanted
    else:
        assert not wanted


def test_a_verdict_is_kept_for_the_same_tensors() -> None:
    table = struct.pack("5P3q", 64, 640, 6400, 0, 0, 10, 0, 0)
    before = arguments.check_pieces.cache_info().hits
    for _ in range(2):
        arguments.check_pieces(table, (0, 0, 0, 0, -1), "wrwww")
    assert arguments.check_pieces.cache_info().hits == before + 1
