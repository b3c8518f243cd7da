"""Groups of parameters: one flat buffer, freed and gathered; tensors without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_group, parameters
from zero_trial.sharding.guards.freed import FreedParameter, absent, is_absent
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.plan import Home

SHAPES = [(6, 10), (6,), (), (3, 2, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
