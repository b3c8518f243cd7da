"""Groups of parameters: one flat buffer, freed and gathered; tensors without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import address, make_group, parameters
from zero_trial.sharding.guards.freed import FreedParameter, absent, is_absent
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.plan import Home

SHAPES = [(6, 10), (6,), (), (3, 2, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_parameters_become_views_of_one_buffer() -> None:
    params = parameters(SHAPES)
    before = [param.detach().clone() for param in params]
    group = make_group(params)
    assert {address(param) for param in params} == {address(group.full)}
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
    group.full.zero_()
    assert all(param.eq(0).all() for param in params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_values_are_rounded_for_the_parameters_and_not_for_the_masters(dtype: torch.dtype) -> None:
    params = parameters(SHAPES)
    before = [param.detach().clone() for param in params]
    group = make_group(params, stage=1, dtype=dtype)
    for param, value, slot in zip(params, before, group.layout.slots, strict=True):
        assert torch.equal(param, value.to(dtype)) and param.dtype == dtype
        assert torch.equal(group.master[slot.offset : slot.offset + slot.numel], value.reshape(-1))
    assert (group.master is group.shard) is (dtype == torch.float32)
    padding = torch.ones(group.layout.numel, dtype=torch.bool)
    for slot in group.layout.slots:
        padding[slot.offset : slot.offset + slot.numel] = False
    assert group.full[padding].eq(0).all()


@pytest.mark.parametrize(
    ("dtype", "stage", "home"),
    [(DTYPES[0], 1, Home.DEVICE), (DTYPES[1], 3, Home.DEVICE), (DTYPES[2], 1, Home.HOST), (DTYPES[1], 3, Home.NVME)],
)
def test_padding_is_zero_wherever_parameters_live(dtype: torch.dtype, stage: int, home: Home) -> None:
    """What memory happened to hold would be stored, and NaN in it is unequal to itself."""
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        group = make_group(parameters(SHAPES), stage, dtype=dtype, home=home)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [group.home[start:stop].eq(0).all().item() for start, stop in group.layout.gaps()] == [True] * 4


def test_strided_first_values_keep_their_places() -> None:
    param = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    group = make_group([param])
    assert torch.equal(param, torch.arange(12.0).view(3, 4).t()) and param.is_contiguous()
    assert group.layout.slots[0].shape == (4, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_freed_parameters_keep_their_shape(dtype: torch.dtype) -> None:
    params = parameters(SHAPES)
    group = make_group(params, stage=3, dtype=dtype)
    assert not group.live and group.full.untyped_storage().nbytes() == 0
    for param, shape in zip(params, SHAPES, strict=True):
        assert tuple(param.shape) == shape and isinstance(param, FreedParameter)
        assert param.untyped_storage().nbytes() == dtype.itemsize, "no memory but one element"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_brings_back_the_same_bits(dtype: torch.dtype) -> None:
    params = parameters(SHAPES)
    before = [param.detach().to(dtype) for param in params]
    group = make_group(params, stage=3, dtype=dtype)
    for _ in range(2):
        group.unshard_async()
        group.unshard_async()
        assert group.state is GroupState.GATHERING
        group.finish_unshard()
        group.finish_unshard()
        assert group.live and all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
        group.reshard()
        group.reshard()
        assert all(isinstance(param, FreedParameter) for param in params)


def test_tensors_that_autograd_saved_see_the_refilled_storage() -> None:
    """Freed between forward and backward: the saved weight is a view of the storage that the next
    gather fills."""
    (weight,) = parameters([(4, 4)])
    value = weight.detach().clone()
    group = make_group([weight], stage=3)
    group.unshard_async()
    group.finish_unshard()
    x = torch.ones(2, 4, requires_grad=True)
    y = x @ weight
    group.reshard()
    group.unshard_async()
    group.finish_unshard()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4) @ value.t())  # type: ignore[arg-type]


def test_parameters_that_always_live_are_not_freed() -> None:
    params = parameters(SHAPES)
    group = make_group(params, stage=2)
    group.reshard()
    assert group.live and not any(isinstance(param, FreedParameter) for param in params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 3])
def test_publishing_rounds_the_masters_into_the_parameters(stage: int, dtype: torch.dtype) -> None:
    params = parameters(SHAPES)
    group = make_group(params, stage=stage, dtype=dtype)
    wanted = torch.randn(group.layout.numel)
    group.master.copy_(wanted)
    assert group.publish() is None
    group.unshard_async()
    group.finish_unshard()
    for param, slot in zip(params, group.layout.slots, strict=True):
        assert torch.equal(param, wanted[slot.offset : slot.offset + slot.numel].view(slot.shape).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 3])
def test_taking_an_edited_copy(stage: int, dtype: torch.dtype) -> None:
    params = parameters(SHAPES)
    group = make_group(params, stage=stage, dtype=dtype)
    group.unshard_async()
    group.finish_unshard()
    with torch.no_grad():
        params[0].fill_(1.5)
    group.load_full()
    group.reshard()
    assert group.master[:60].eq(1.5).all()
    group.unshard_async()
    group.finish_unshard()
    assert params[0].eq(1.5).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_frozen_parameters_that_are_no_floats(dtype: torch.dtype) -> None:
    """Quantized weights: they are freed and come back as they were."""
    param = nn.Parameter(torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype), requires_grad=False)
    group = make_group([param], stage=3, dtype=dtype, trainable=False, runs={})
    assert param.shape == (2, 3) and group.full.untyped_storage().nbytes() == 0
    group.unshard_async()
    group.finish_unshard()
    assert torch.equal(param, torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype))


def test_a_tensor_that_is_absent_has_its_shape_and_no_memory() -> None:
    """Its numbers are NaN, and its integers as large as can be."""
    cpu = torch.device("cpu")
    weight = absent((1000, 1000), torch.float32, cpu)
    assert weight.shape == (1000, 1000) and weight.untyped_storage().nbytes() == 4
    assert (weight @ torch.ones(1000)).isnan().all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64):
        value = absent((2,), dtype, cpu)
        assert value.dtype == dtype and value.to(torch.complex64).isnan().all()
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        assert absent((2,), dtype, cpu).tolist() == [torch.iinfo(dtype).max] * 2
    for shape in ((), (0, 3)):
        assert absent(shape, torch.float32, cpu).shape == shape
    assert absent((3,), torch.bool, cpu).dtype == torch.bool and is_absent(absent((2, 3), torch.float32, cpu))
    assert not any(map(is_absent, (torch.zeros(2, 3), torch.zeros(1), torch.zeros(0), torch.zeros(6)[::2])))
