"""Saved inputs: cut and put together again, on as many pretended ranks as wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.activation_checkpointing import SavedInputs, to_host


class Axis:
    """Ranks of one process: a gather takes what every rank has kept."""

    def __init__(self, size: int, index: int, kept: list[torch.Tensor]) -> None:
        self.size, self.index, self.kept = size, index, kept

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Any:
        assert shard.numel() * self.size == full.numel() and label == "saved activations"
        full.copy_(torch.cat(self.kept))
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(12,), (5, 7), (2, 3, 4)])
def test_every_rank_keeps_its_part_and_all_get_the_whole(size: int, shape: tuple[int, ...]):
    x = torch.randn(shape)
    kept: list[torch.Tensor] = []
    inputs = [SavedInputs(Axis(size, index, kept), None) for index in range(size)]
    packed = [each.pack(x) for each in inputs]
    kept += [entry.data for entry in packed]
    assert {entry.data.numel() for entry in packed} == {-(-x.numel() // size)}
    for each, entry in zip(inputs, packed, strict=True):
        assert torch.equal(each.unpack(entry), x)


@pytest.mark.parametrize(
    "x", [torch.arange(10), torch.ones(1), torch.ones(6) > 0], ids=["integers", "too small", "booleans"]
)
def test_what_is_not_worth_cutting_stays_whole(x: torch.Tensor):
    inputs = SavedInputs(Axis(2, 0, []), None)
    packed = inputs.pack(x)
    assert packed.data is x and not packed.cut
    assert torch.equal(inputs.unpack(packed), x)


def test_alone_there_is_nothing_to_cut():
    x = torch.ones(8)
    assert SavedInputs(Axis(1, 0, []), None).pack(x).data is x


def test_the_host_gets_the_part_only():
    sent: list[int] = []

    def host(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.numel())
        return tensor

    SavedInputs(Axis(4, 1, []), host).pack(torch.ones(16))
    assert sent == [4]


def test_on_the_host_already():
    x = torch.ones(3)
    assert to_host(x) is x
