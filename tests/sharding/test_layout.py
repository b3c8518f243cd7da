"""Layouts of flat buffers, the dtypes in them, and their norm."""

from __future__ import annotations

import math
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_trial.sharding import layout as layout_module
from zero_trial.sharding.layout import (
    ALIGN,
    Layout,
    clip_factor,
    column_sums,
    describe_dtypes,
    has_own_master,
    lay_out,
    living_dtype,
    square_sum,
    square_sum_of_rows,
    wide_dtype,
)


def test_tensors_lie_end_to_end_and_are_cut_into_equal_shards() -> None:
    layout = lay_out([("weight", (6, 10)), ("bias", (6,))], shards=2)
    assert [(slot.name, slot.offset, slot.numel) for slot in layout.slots] == [("weight", 0, 60), ("bias", 64, 6)]
    assert (layout.numel, layout.shard_numel, layout.payload) == (128, 64, 66) and layout.shard_range(1) == (64, 128)
    assert [(p.slot.name, p.start, p.stop, p.offset) for p in layout.pieces(0)] == [("weight", 0, 60, 0)]
    assert [(p.slot.name, p.start, p.stop, p.offset) for p in layout.pieces(1)] == [("bias", 0, 6, 0)]


shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=8)


def built(tensors: list[tuple[int, ...]], shards: int, replicas: int) -> Layout:
    return lay_out([(f"t{index}", shape) for index, shape in enumerate(tensors)], shards, replicas)


@given(shapes, st.integers(1, 9), st.integers(1, 4))
def test_alignment_and_price(tensors: list[tuple[int, ...]], shards: int, replicas: int) -> None:
    layout = built(tensors, shards, replicas)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGN == 0 and slot.offset >= end
        end = slot.offset + slot.numel
    assert end <= layout.numel and layout.shard_numel * shards == layout.numel
    assert layout.shard_numel % (ALIGN * replicas) == 0 and layout.shard_numel > 0
    # the price that the module's docstring states
    assert layout.numel - layout.payload <= (ALIGN - 1) * len(tensors) + ALIGN * shards * replicas


@given(shapes, st.integers(1, 9))
def test_pieces_cover_every_element_exactly_once(tensors: list[tuple[int, ...]], shards: int) -> None:
    layout = built(tensors, shards, 1)
    owners: dict[tuple[str, int], int] = {}
    for index in range(shards):
        reached = 0
        for piece in layout.pieces(index):
            assert piece.offset >= reached
            reached = piece.offset + piece.numel
            assert reached <= layout.shard_numel
            for element in range(piece.start, piece.stop):
                assert (piece.slot.name, element) not in owners
                owners[piece.slot.name, element] = index
                assert (
                    layout.shard_range(index)[0] + piece.offset + element - piece.start == piece.slot.offset + element
                )
    assert len(owners) == sum(prod(shape) for shape in tensors)


@given(shapes, st.integers(1, 3))
def test_slot_at_is_the_way_back(tensors: list[tuple[int, ...]], shards: int) -> None:
    layout = built(tensors, shards, 1)
    for position in range(layout.numel):
        inside = [slot for slot in layout.slots if slot.offset <= position < slot.offset + slot.numel]
        assert layout.slot_at(position) == (inside[0] if inside else None)


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("own", "asked", "lives"),
    [
        (F64, F32, F64),
        (F32, F32, F32),
        (BF16, F32, BF16),
        (F64, BF16, BF16),
        (F32, F16, F16),
        (torch.int64, BF16, torch.int64),
        (torch.complex64, BF16, torch.complex64),
    ],
)
def test_what_was_given_stays_unless_sixteen_bits_are_asked_for(
    own: torch.dtype, asked: torch.dtype, lives: torch.dtype
):
    assert living_dtype(own, asked) == lives


def test_what_is_as_wide_as_a_float64_parameter():
    assert wide_dtype(F64, F32) == wide_dtype(F64, BF16) == F64
    assert wide_dtype(F32, BF16) == BF16 and wide_dtype(BF16, F32) == F32
    assert has_own_master(F64) and has_own_master(F32) and not has_own_master(BF16)


@pytest.mark.parametrize(
    ("dtypes", "asked", "lines"),
    [
        ([F32, F32], F32, []),
        ([F32], BF16, []),
        ([BF16], BF16, []),
        ([], F32, []),
        ([F64], F32, ["parameters keep their dtypes (1 float64)"]),
        ([F64], BF16, ["1 float64 are cast to bfloat16"]),
        ([F32, BF16], BF16, ["1 bfloat16, 1 float32 are cast to bfloat16, with fp32 masters; remove the section"]),
        ([F16, F32], F32, ["(1 float16, 1 float32)", "no loss scale"]),
    ],
)
def test_one_line_where_a_model_is_not_plainly_what_was_asked_for(
    dtypes: list[torch.dtype], asked: torch.dtype, lines: list[str]
):
    said = describe_dtypes([(f"p{index}", dtype) for index, dtype in enumerate(dtypes)], asked)
    assert len(said) == len(lines)
    assert all(part in line for part, line in zip(lines, said, strict=True)), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_sums_change_with_every_exchange(dtype: torch.dtype) -> None:
    """Also where the words are in one column of the table, and in a view that begins anywhere."""
    per_word = 8 // dtype.itemsize
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    known = column_sums(values)
    assert torch.equal(known, column_sums(values.clone()))
    assert torch.equal(column_sums(values[1:]), column_sums(values[1:].clone()))
    for words in (1, 512, 1021, 4096, 16 * 1021 + 1, 17 * 1021, 30_000):
        for first in (0, 5, len(values) - 1 - words * per_word):
            one, other = values.clone(), values.clone()
            one[first], one[first + words * per_word] = 1, 2
            other[first], other[first + words * per_word] = 2, 1
            assert not torch.equal(column_sums(one), column_sums(other))


@pytest.fixture(params=["native where it can be had", "rows"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "rows":
        monkeypatch.setattr(layout_module, "native_on", lambda device: False)


@pytest.mark.usefixtures("kernels")
def test_the_sum_of_squares_of_a_shard() -> None:
    """In double precision; the same bits however the buffer is cut, and one bad element shows."""
    shard = torch.zeros(ALIGN)
    shard[:2] = torch.tensor([3.0, 4.0])
    # a row's norm is rounded to fp32 before it is squared
    assert square_sum(shard).item() == pytest.approx(25.0, rel=1e-6) and square_sum(shard).dtype == torch.float64
    for dtype in (F32, BF16, F16):
        values = (torch.randn(ALIGN * 300, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
        assert square_sum(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-7)
    values = torch.randn(ALIGN * 12 * 50, generator=torch.Generator().manual_seed(3))
    whole = torch.tensor(math.sqrt(square_sum(values).item()))
    for shards in (2, 3, 4, 6):
        parts = torch.stack([square_sum(part) for part in values.view(shards, -1)]).sum()
        assert torch.tensor(math.sqrt(parts.item())).item() == whole.item()  # both rounded to fp32
    for bad, position in ((float("nan"), 0), (float("inf"), 31), (-float("inf"), 32), (float("nan"), 95)):
        values = torch.ones(96)
        values[position] = bad
        assert not math.isfinite(square_sum(values).item())


def test_an_element_too_large_for_a_row_counts_as_not_finite() -> None:
    values = torch.zeros(ALIGN)
    values[0] = 1e18
    assert math.isfinite(square_sum_of_rows(values).item())
    values[0] = 2e19
    assert not math.isfinite(square_sum_of_rows(values).item())


@pytest.mark.parametrize(("norm", "limit"), [(2.0, 1.0), (0.5, 1.0), (1.0, 1.0), (7.0, 0.1), (0.0, 1.0)])
def test_clipping_is_that_of_torch(norm: float, limit: float) -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([param], limit)
    assert norm * clip_factor(norm, limit) == pytest.approx(param.grad.item(), abs=1e-15)
    assert clip_factor(1e9, 0.0) == 1.0, "no limit clips nothing"
