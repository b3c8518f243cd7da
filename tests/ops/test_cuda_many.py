"""Steps of many tensors on the emulator: one launch, several groups, and none that a CUDA graph could not replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import emulated_cuda
from tests.support.cuda_cases import COPY_OF, EVERYWHERE, FLOATS, LENGTHS, TILE, at, randn, same, states
from tests.support.emulated_cuda import Emulator
from zero_trial.ops import arguments
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial
NUMBERS: dict[str, Callable[[int], tuple[Any, ...]]] = {  # of tensor i
    "adam_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 1e-8, 0.1 * (i % 3), float(i + 1)),
    "lion_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 0.1),
    "adagrad_": lambda i: (1e-2, 1e-10, 0.1 * i),
    "sgd_": lambda i: (1e-2, 0.9, 0.1, 0.1 * i, i % 2 == 0),
}
REST: dict[str, tuple[Any, ...]] = {"adam_": (0.7, True), "lion_": (0.7,), "adagrad_": (0.7,), "sgd_": (False, 0.7)}


@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_of_all_offsets_and_sizes(emulator: Emulator, dtype: torch.dtype) -> None:
    made = [
        [randn(n, n), randn(n, n + 1, dtype), randn(n, n + 2), randn(n, n + 3).abs(), torch.zeros(n, dtype=low)]
        for low in (COPY_OF[dtype],)
        for _, n in EVERYWHERE
    ]
    views = [[at(shift, x) for x in row] for (shift, _), row in zip(EVERYWHERE, made, strict=True)]
    p, g, m, v, out = (list(column) for column in zip(*views, strict=True))
    rest = (None, None, *([x] * len(p) for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 3.0)), 0.7, True)
    with emulator.watching(*p, *m, *v, *out, read_only=g):
        CUDA["adam_many_"](p, g, m, v, out, *rest)
    assert emulator.library.launch_count() == 1
    wanted = [list(column) for column in zip(*made, strict=True)]
    ops.adam_many_(*wanted, *rest)
    for mine, theirs in zip((p, m, v, out), (wanted[0], *wanted[2:]), strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("with_flags", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_many_tensors_of_several_groups_in_one_launch(emulator: Emulator, name: str, with_flags: bool) -> None:
    flags = (torch.zeros(1), torch.tensor(0.31)) if with_flags else (None, None)
    p = [at(i % 2, randn(n, i)) for i, n in enumerate(LENGTHS)]
    g = [at(i % 3, randn(n, 10 + i, torch.bfloat16)) for i, n in enumerate(LENGTHS)]
    s = [[torch.zeros(n) for n in LENGTHS] for _ in states(name, 1)]
    out = [torch.zeros(n, dtype=torch.bfloat16) for n in LENGTHS]
    numbers = [list(column) for column in zip(*(NUMBERS[name](i) for i in range(len(LENGTHS))), strict=True)]
    copies = [[x.clone() for x in each] for each in (p, *s, out)]
    with emulator.watching(*p, *(x for each in s for x in each), *out, *flags, read_only=g):
        CUDA[f"{name[:-1]}_many_"](p, g, *s, out, *flags, *numbers, *REST[name])
    assert emulator.library.launch_count() == 1
    getattr(ops, f"{name[:-1]}_many_")(copies[0], g, *copies[1:], *flags, *numbers, *REST[name])
    for mine, theirs in zip((p, *s, out), copies, strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, TILE + 1, 20 * TILE + 77])
@pytest.mark.parametrize("name", NUMBERS)
def test_one_tensor_alone_is_told_by_the_device_without_a_table(
    emulator: Emulator, name: str, n: int, skipped: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine: one piece per unit, its factor and whether to skip in device memory."""
    control = torch.tensor([3.0, 0.31, skipped])
    values = [randn(n), *states(name, n), torch.zeros(n, dtype=torch.bfloat16)]
    lists, copies = ([[x.clone()] for x in values] for _ in range(2))
    g, numbers = [randn(n, 10, torch.bfloat16)], [[number] for number in NUMBERS[name](2)]
    tables: list[bytes] = []
    monkeypatch.setattr(arguments, "upload", lambda content, device: tables.append(content))
    with emulator.watching(*(x for each in lists for x in each), control, read_only=g):
        CUDA[f"{name[:-1]}_many_"](lists[0], g, *lists[1:], control[2], control[1:2], *numbers, *REST[name])
    assert emulator.library.launch_count() == 1 and not tables
    getattr(ops, f"{name[:-1]}_many_")(copies[0], g, *copies[1:], control[2], control[1:2], *numbers, *REST[name])
    for (mine,), (theirs,), before in zip(lists, copies, values, strict=True):
        assert same(mine, theirs) and same(mine, before) == bool(skipped)


def test_other_dtypes_go_in_launches_of_their_own_and_what_no_kernel_takes_in_plain_torch(emulator: Emulator) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    p = [randn(50, i) for i in range(4)] + [randn(6).double()]
    g = [randn(50, i + 5, dtype) for i, dtype in enumerate(dtypes)] + [randn(6).double()]
    m, v = ([torch.zeros_like(x) for x in p] for _ in range(2))
    copies = [[x.clone() for x in each] for each in (p, m, v)]
    numbers = [list(column) for column in zip(*(NUMBERS["adam_"](i) for i in range(5)), strict=True)]
    with emulator.watching(*p, *m, *v, read_only=g):
        CUDA["adam_many_"](p, g, m, v, [], None, None, *numbers, 1.0, True)
    assert emulator.library.launch_count() == 2
    ops.adam_many_(copies[0], g, *copies[1:], [], None, None, *numbers, 1.0, True)
    assert all(
        same(x, y) for mine, theirs in zip((p, m, v), copies, strict=True) for x, y in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_another_device_stay_out_of_the_launch(emulator: Emulator, first: int) -> None:
    """Whichever comes first: a kernel cannot reach them."""
    there = torch.device("meta")
    p, g, m, v = ([randn(50, k).abs(), randn(50, k).to(there)] for k in range(4))
    lists = [each[::-1] if first else each for each in (p, g, m, v)]
    want = [x[0].clone() for x in (p, m, v)]
    numbers = [list(column) for column in zip(*(NUMBERS["adam_"](0) for _ in range(2)), strict=True)]
    with emulator.watching(p[0], m[0], v[0], read_only=[g[0]]):
        CUDA["adam_many_"](*lists, [], None, None, *numbers, 1.0, True)
        stepped = [x[0].clone() for x in (p, m, v)]
        assert emulator.library.launch_count() == 1
        CUDA["add_many_"](lists[0], lists[1])
        CUDA["copy_many_"](lists[0], lists[0])
        with contextlib.suppress(NotImplementedError):  # of plain torch, which cannot read that device
            CUDA["lamb_moments_"](*lists, None, None, *numbers[1:], 1.0, True)
    assert emulator.library.launch_count() == 3
    ops.adam_many_(want[:1], g[:1], want[1:2], want[2:], [], None, None, *(x[:1] for x in numbers), 1.0, True)
    assert all(same(x, y) for x, y in zip(stepped, want, strict=True)) and same(p[0], want[0] + g[0])


def test_what_a_cuda_graph_captures_reads_nothing_of_the_hosts_later(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table is uploaded: a replay would read what lies there by then."""
    backend = emulated_cuda.install(emulator, monkeypatch)
    backend.capturing = lambda where: True
    monkeypatch.setattr(arguments, "upload", lambda *_: pytest.fail("a table"))
    lengths, low = (5, TILE + 1, 40), torch.bfloat16
    columns = [[x] * 3 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 2.0)]
    ends = []
    for step, add, moments in ((CUDA["adam_many_"], CUDA["add_many_"], CUDA["lamb_moments_"]), (ops.adam_many_,) * 3):
        p, g, m, v = ([randn(n, k).abs() for n in lengths] for k in range(4))
        out, flags = [torch.zeros(n, dtype=low) for n in lengths], (torch.zeros(1), torch.tensor([0.4]))
        with emulator.watching(*p, *m, *v, *out, *flags, read_only=g):
            step(p, g, m, v, out, *flags, *columns, 0.7, True)
            if step is CUDA["adam_many_"]:
                assert emulator.library.launch_count() == 3
                add([x.clone() for x in p], out)
                moments(p, g, [x.clone() for x in m], [x.clone() for x in v], None, None, *columns[1:], 1.0, True)
                assert emulator.library.launch_count() == 3
        ends.append([*p, *m, *v, *out])
    assert all(same(x, y) for x, y in zip(*ends, strict=True))
