"""Tensors without values, on the meta device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.preflight import valueless
from zero_trial.preflight.blueprint import Blueprint
from zero_trial.preflight.dry_run import Role, dry_run
from zero_trial.preflight.live_bytes import LiveBytes
from zero_trial.preflight.valueless import HostTensor, HostTensors, hosted


def held(model: nn.Module, batch: torch.Tensor) -> tuple[int, int]:
    """Bytes that forward and backward save, and hold at most."""
    live = LiveBytes("cpu")
    with live:
        live.hold([*model.parameters(), batch])
        live.restart()
        with live.saving():
            out = model(batch)
            out.float().square().mean().backward()
    return live.saved_peak, live.peak


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        lambda: nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.LayerNorm(8)).bfloat16(),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).bfloat16(),
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(2)),
        lambda: nn.RMSNorm(8),
    ],
)
def test_forms_are_those_of_the_cpus_kernels(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer norm of bf16 has statistics in bf16 there, and in fp32 on the meta device. None of
    torch's fake tensors is needed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a fake tensor")

    monkeypatch.setattr(FakeTensorMode, "__init__", refuse)
    real = build()
    dtype = next(real.parameters()).dtype
    without = build()
    for module in without.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(hosted(torch.empty_like(param, device="meta")))
    batch = torch.randn(2, 4, 8).to(dtype)
    expected = held(real, batch)
    with HostTensors():
        assert held(without, hosted(torch.empty_like(batch, device="meta"))) == expected


def test_what_is_made_on_the_host_is_small_or_has_no_memory() -> None:
    with HostTensors():
        assert isinstance(torch.zeros(1 << 40), HostTensor) and isinstance(torch.rand(1 << 40), HostTensor)
        assert torch.arange(3).tolist() == [0, 1, 2] and torch.tensor([1.0]).item() == 1.0
        total = torch.zeros(())  # counts something, and may be read
        total += torch.zeros(1 << 40).sum()
        assert total.item() == 0.0 and torch.zeros(1 << 40).device.type == "cpu"
        assert torch.zeros(3, device="meta").is_meta
    assert torch.zeros(3).tolist() == [0, 0, 0]


def test_layers_of_a_plan_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parameters and state are in files: many layers are planned in seconds."""
    computed: list[Any] = []
    once = valueless._outcome
    monkeypatch.setattr(valueless, "_outcome", lambda *given: (computed.append(given), once(*given))[1])
    place = {"device": "nvme", "nvme_path": "."}
    zero = {"stage": 0, "module_granularity_threshold": 1, "sub_group_size": 4096, "offload_optimizer": place}
    zero |= {"offload_param": place | {"max_in_cpu": 0, "buffer_size": 4096}}
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    settings = read_ds_config(config | {"zero_optimization": zero})
    counts, figures = [], []
    for layers in (8, 16):
        valueless.forget_outcomes()
        computed.clear()
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        figures.append(dry_run([Role(Blueprint(model), settings)], 1, None))
        counts.append(len(computed))
    assert 0 < counts[1] <= counts[0] + 4 < 200
    assert figures[1].disk > 1.9 * figures[0].disk > 0


def test_what_only_writes_needs_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """normal_() of torch's decompositions imports its compiler."""
    valueless.forget_outcomes()
    calls, outcome = [], valueless._outcome
    monkeypatch.setattr(valueless, "_outcome", lambda func, *rest: calls.append(func) or outcome(func, *rest))
    with valueless.RepeatedMeta():
        weight = torch.empty(3, 4, device="meta")
        assert torch.nn.init.normal_(weight) is weight and torch.nn.init.zeros_(weight) is weight
    assert calls == []


@pytest.mark.parametrize(
    "write",
    [
        lambda: torch.empty(3, device="meta").normal_(std=-1),
        lambda: torch.empty(3, device="meta").cumsum_(dim=5),
        lambda: torch.empty(3, device="meta", dtype=torch.long).div_(2),
        lambda: torch.empty(3, device="meta", dtype=torch.long).normal_(),
    ],
)
def test_what_cannot_be_written_is_an_error(write: Callable[[], Any]) -> None:
    valueless.forget_outcomes()
    for _ in range(2):
        with valueless.RepeatedMeta(), pytest.raises((RuntimeError, IndexError)):
            write()


def test_an_operation_is_computed_once_for_operands_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view stays in the memory of its operand, and a wrong shape is an error each time."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr(valueless, "_OUTCOMES", known)
    x, y = torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta").t()
    with valueless.RepeatedMeta():
        sizes = []
        for _ in range(2):
            twice = [x + 1, x + 1.5, y + 1, x.long() + 1, x.long() + 1.5, torch.nn.functional.gelu(x)]
            assert [each.dtype for each in twice[3:5]] == [torch.int64, torch.float32]
            assert [each.stride() for each in twice[1:3]] == [(4, 1), (1, 3)]
            assert x.normal_() is x and x.add_(y) is x
            assert len({each.untyped_storage()._cdata for each in (x, *twice)}) == 7
            assert x.view(12).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert [each.shape for each in torch.max(x, 0)] == [(4,), (4,)]
            z = torch.empty(2, 1, device="meta")
            assert z.t_() is z and z.shape == (1, 2)
            with pytest.raises(RuntimeError):
                x + torch.empty(5, device="meta")
            sizes.append(len(known))
        assert sizes[0] == sizes[1] > 6
        assert torch.ones(2).add_(1).tolist() == [2, 2]  # what has values is computed


def test_what_else_decides_about_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default dtype, the memory of ``out=``, and subclasses of tensors."""
    monkeypatch.setattr(valueless, "_OUTCOMES", {})
    before = torch.get_default_dtype()
    n, x = torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(3, 4, device="meta")

    class Other(torch.Tensor):
        pass

    with valueless.RepeatedMeta():
        try:
            found = []
            for dtype in (torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                found.append((n / n).dtype)
        finally:
            torch.set_default_dtype(before)
        assert found == [torch.float32, torch.float64]
        for _ in range(2):
            out = torch.empty(0, device="meta")
            assert torch.add(x, 1, out=out) is out and out.shape == (3, 4)
            same = torch.empty(3, 4, device="meta")
            assert valueless.on_meta(torch.ops.aten.add.out, (x, 1), {"out": same})[0] is same
    plain, other = valueless._form(x), valueless._form(x.as_subclass(Other))
    assert plain != other
    valueless.forget_outcomes()
    assert not valueless._OUTCOMES
