"""Arguments of kernels: what is accepted, refused for overlap, and packed into tables as the
kernels read them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cuda_cases import STEPS
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import ConfigError
from zero_trial.ops import arguments, plain
from zero_trial.ops.arguments import TILE, Interval, LaunchItem, check, table_of, tiles_of, upload
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial
COLUMNS = [[x] for x in (1e-3, 0.9, 0.99, 1e-8, 0.1)]


def test_sizes_that_do_not_fit_are_refused(emulator: Emulator) -> None:
    five, four = torch.zeros(5), torch.zeros(4)
    with pytest.raises(ConfigError, match="different sizes"):
        CUDA["adam_"](five, four, five, five, None, None, *STEPS["adam_"](1, 1.0))
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["copy_many_"]([five], [five, five])
    with pytest.raises(ConfigError, match="number 1"):
        plain.same_sizes([five, five], [five, four])
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["adam_many_"]([five], [five], [five], [five], [], None, None, *COLUMNS, [1.0, 2.0], 1.0, True)
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["lamb_apply_"]([five], [five], [five], [], None, torch.ones(1), *COLUMNS, [1.0, 2.0], True)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan")])
def test_steps_of_adam_begin_with_the_first(emulator: Emulator, step: float) -> None:
    p, g, m, v = (torch.zeros(3) for _ in range(4))
    for each in (SimpleNamespace(**CUDA), ops):
        with pytest.raises(ConfigError, match="numbered from 1"):
            each.adam_(p, g, m, v, None, None, 1e-3, 0.9, 0.99, 1e-8, 0.1, step, 1.0, True)
        with pytest.raises(ConfigError, match="numbered from 1"):
            each.adam_many_([p], [g], [m], [v], [], None, None, *COLUMNS, [step], 1.0, True)


def test_a_parameter_in_a_graph_is_refused(emulator: Emulator) -> None:
    p = torch.zeros(3, requires_grad=True)
    g, m, v = (torch.zeros(3) for _ in range(3))
    calls: list[Callable[[], object]] = [
        lambda: CUDA["adam_"](p, g, m, v, None, None, *STEPS["adam_"](1, 1.0)),
        lambda: CUDA["adam_many_"]([p], [g], [m], [v], [], None, None, *COLUMNS, [1.0], 1.0, True),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="no derivative"):
            call()
        with torch.no_grad(), emulator.watching(p, g, m, v):
            call()


def test_nothing_to_do_is_no_launch(emulator: Emulator) -> None:
    emulator.library.forget()
    CUDA["lamb_apply_"]([], [], [], [], torch.zeros(1), torch.ones(0), [], [], [], [], [], [], True)
    assert CUDA["lamb_moments_"]([], [], [], [], None, None, [], [], [], [], [], 1.0, True).shape == (2, 0)
    CUDA["adam_many_"]([], [], [], [], [], torch.zeros(1), None, [], [], [], [], [], [], 1.0, True)
    assert emulator.library.launch_count() == 0


def test_arguments_fill_whole_words() -> None:
    assert [len(arguments.padded(bytes(n))) for n in (0, 1, 8, 20)] == [0, 8, 8, 24]


def test_lists_are_picked_from() -> None:
    assert arguments.pick([2, 0], "abc", [], [1, 2, 3]) == [["c", "a"], [], [3, 1]]


def test_pieces_in_tiles_and_each_group_once() -> None:
    p, q, r = torch.zeros(TILE + 1), torch.zeros(3), torch.zeros(TILE)
    g = torch.zeros(3, dtype=torch.bfloat16)
    table = table_of(
        [LaunchItem(p, scalars=b"aaaa"), LaunchItem(q, g, scalars=b"bbbb"), LaunchItem(r, scalars=b"aaaa")]
    )
    assert (table.count, table.tiles, table.groups) == (3, 4, 3 * 64)
    assert table.content[table.groups :] == b"aaaabbbb"
    rows = [struct.unpack("5P3q", table.content[64 * i : 64 * (i + 1)]) for i in range(3)]
    assert rows[0] == (p.data_ptr(), 0, 0, 0, 0, TILE + 1, 0, 0)
    assert rows[1] == (q.data_ptr(), g.data_ptr(), 0, 0, 0, 3, 2, 1)
    assert rows[2] == (r.data_ptr(), 0, 0, 0, 0, TILE, 3, 0)


@pytest.mark.parametrize(("n", "tiles"), [(0, 0), (1, 1), (TILE, 1), (TILE + 1, 2)])
def test_tiles(n: int, tiles: int) -> None:
    assert tiles_of(n) == tiles


def test_the_bytes_arrive() -> None:
    assert bytes(upload(b"\x00\x07\xff", torch.device("cpu")).tolist()) == b"\x00\x07\xff"


NAMES = ("parameter", "gradient", "state", "second state", "rounded copy")


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(5), 2)))
def test_both_are_named(emulator: Emulator, first: int, second: int) -> None:
    """One element in common is enough."""
    n, room = 10, torch.zeros(100)
    tensors = [torch.zeros(n) for _ in range(5)]
    tensors[first], tensors[second] = room[20 : 20 + n], room[11 : 11 + n]
    low = [x.bfloat16() if k == 4 and x.untyped_storage().nbytes() < 400 else x for k, x in enumerate(tensors)]
    for adam_, tried in ((CUDA["adam_"], tensors), *(((ops.adam_, low),) if second < 4 else ())):
        with pytest.raises(ConfigError) as error:
            adam_(*tried, None, *STEPS["adam_"](1, 1.0))
        assert f"the {NAMES[second]} and the {NAMES[first]} overlap" in str(error.value)
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
