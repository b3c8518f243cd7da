"""What a model on the meta device consists of before and after it gets values."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.sharding.parts import mesh_for
from zero_trial.errors import ConfigError
from zero_trial.sharding.meta import initialize_buffers, place_absent

CPU = torch.device("cpu")


def test_parameters_stay_the_same_objects_with_their_marks() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    weight = model.weight
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    model.bias.requires_grad_(False)
    place_absent(model, CPU)
    assert model.weight is weight and weight.tensor_model_parallel  # type: ignore[attr-defined]
    assert weight.device == CPU and weight.untyped_storage().nbytes() == 4 and bool(weight.isnan().all())
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and not model.bias.requires_grad


def test_a_weak_reference_is_an_error_in_words() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    held = weakref.ref(model.weight)
    with pytest.raises(ConfigError) as error:
        place_absent(model, CPU)
    assert held() is not None and error.value.where == "initialize(model)"


class Kinds(nn.Module):
    """Buffers that hold every value of their dtype; with ``way`` None, nothing fills them."""

    def __init__(self, dtype: torch.dtype, way: str | None) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("one", torch.tensor(0, dtype=dtype), persistent=False)
        self.register_buffer("table", torch.zeros(256, dtype=dtype), persistent=False)
        self.register_buffer("none", torch.zeros(0, dtype=dtype), persistent=False)

    def reset_parameters(self) -> None:
        every = torch.arange(256).to(self.table.dtype)
        if self.way == "in place":
            self.one.copy_(torch.tensor(127))  # in int8 it is the value of what is not filled
            self.table.copy_(every)
        elif self.way == "by data":
            self.one.data.zero_()
            self.table.data.copy_(every)
        elif self.way == "again":
            self.one, self.table = torch.ones_like(self.one), every


def fill(model: nn.Module) -> None:
    names = [name for name, _ in model.named_buffers()]
    initialize_buffers(model, names, mesh_for(3).data, place_absent(model, CPU))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32])
def test_a_buffer_is_filled_if_it_was_written(dtype: torch.dtype) -> None:
    for way in ("in place", "by data", "again", None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), Kinds(dtype, way))
        if way is not None:
            fill(model)
            assert torch.equal(model[1].table, torch.arange(256).to(dtype)), way
            continue
        with pytest.raises(ConfigError) as error:
            fill(model)
        assert "1.one (Kinds), 1.table (Kinds)" in str(error.value) and "1.none" not in str(error.value)
