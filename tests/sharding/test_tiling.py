"""A linear layer in tiles beside nn.Linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dense import STAGES
from tests.support.models import make_engine
from tests.support.pool import Pools
from zero_trial.errors import ConfigError, TrialError
from zero_trial.zero import GatheredParameters, Init, TiledLinear, TiledLinearReturnBias


def pair(in_splits: int, out_splits: int, **options: Any) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(0)
    dense = nn.Linear(11, 17, bias=options.get("bias", True)).double()
    tiled = TiledLinear(
        11, 17, in_splits=in_splits, out_splits=out_splits, init_linear=dense, dtype=torch.float64, **options
    )
    return dense, tiled


def whole_gradient(tiled: TiledLinear) -> torch.Tensor:
    rows = [torch.cat([tile.weight.grad for tile in tiles], dim=1) for tiles in tiled.linears]  # type: ignore[attr-defined]
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("in_splits", "out_splits", "bias"), [(1, 1, True), (3, 1, False), (1, 4, True), (2, 3, False), (5, 7, True)]
)
def test_outputs_and_gradients_are_those_of_linear(in_splits: int, out_splits: int, bias: bool) -> None:
    dense, tiled = pair(in_splits, out_splits, bias=bias)
    x = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 4, 17, dtype=torch.float64)
    ((dense(x) - y) ** 2).sum().backward()
    expected, x.grad = x.grad, None
    ((tiled(x) - y) ** 2).sum().backward()
    torch.testing.assert_close(tiled(x), dense(x))
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(whole_gradient(tiled), dense.weight.grad)
    if bias:
        grads = [tiles[-1].bias.grad for tiles in tiled.linears]  # type: ignore[index]
        torch.testing.assert_close(torch.cat(grads), dense.bias.grad)
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in dense.parameters())


def test_parts_in_and_parts_out() -> None:
    dense, tiled = pair(3, 2, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(4, 11, dtype=torch.float64)
    parts = tiled(x.split([4, 4, 3], dim=-1))
    assert [part.shape[-1] for part in parts] == [9, 8]
    torch.testing.assert_close(torch.cat(parts, dim=-1), dense(x))
    with pytest.raises(TrialError, match="3 tensors"):
        tiled(x.split([4, 7], dim=-1))


class WithBias(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_that_return_their_bias(bias: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(11, 17, bias=bias)
    tiled = TiledLinearReturnBias(11, 17, bias=bias, in_splits=2, out_splits=3, linear_cls=WithBias, init_linear=dense)
    x = torch.randn(4, 11)
    output, returned = tiled(x)
    torch.testing.assert_close(output, nn.functional.linear(x, dense.weight))
    assert returned is None if not bias else torch.equal(returned, dense.bias)


@pytest.mark.parametrize(("key", "splits"), [("in_splits", 0), ("in_splits", 12), ("out_splits", 18)])
def test_numbers_of_tiles_are_checked(key: str, splits: int) -> None:
    with pytest.raises(RuntimeError, match=key):
        TiledLinear(11, 17, **{key: splits})  # type: ignore[arg-type]


def test_another_layers_shapes_are_refused() -> None:
    tiled = TiledLinear(11, 17, in_splits=2)
    for other in (nn.Linear(17, 11), nn.Linear(11, 17, bias=False)):
        with pytest.raises(ConfigError, match="copy_params_from"):
            tiled.copy_params_from(other)


def trained_in_tiles(sharded: bool) -> list[Any]:
    """Losses at stage 3 with tiles as blocks, from a dense layer that may be cut itself."""
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Linear(11, 17))
    with Init(enabled=sharded):
        model = nn.Sequential(TiledLinear(11, 17, in_splits=2, out_splits=3))
    if sharded:
        Init(module=dense)
    model[0].copy_params_from(dense[0])  # type: ignore[operator]
    engine = make_engine(lambda: model, {"zero_optimization": STAGES["zero3"]})
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        x, y = torch.randn(6, 11, generator=generator), torch.randn(6, 17, generator=generator)
        loss = ((engine(x) - y) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with GatheredParameters(engine.module):
        return [*losses, float(sum(param.abs().sum() for param in engine.module.parameters()))]


def test_tiles_train_at_stage_3_also_from_a_sharded_layer(ranks: Pools) -> None:
    (plain, *_), (cut, again) = ranks(2).run(trained_in_tiles, False), ranks(2).run(trained_in_tiles, True)
    assert cut == again and cut == pytest.approx(plain, rel=1e-6)
