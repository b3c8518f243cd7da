"""What a model on the meta device consists of before and after it gets values."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.sharding.parts import mesh_for
from zero_trial.errors import ConfigError
from zero_trial.sharding.heap import give_freed_memory_back
from zero_trial.sharding.meta import initialize_meta, place_absent
from zero_trial.sharding.offload.swap_file import SwapFile, move_into

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


class Inner(nn.Module):
    """A model in transformers' way: each part initializes what no inner one has, and ties at the
    end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.done: set[nn.Module] = set()
        self.initialize()

    def initialize(self) -> None:
        for module in [*self.modules()][::-1]:
            self._initialize_weights(module)

    def _initialize_weights(self, module: nn.Module) -> None:
        if not hasattr(module, "initialized"):
            self._init_weights(module)
            module.initialized = True  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class Outer(Inner):
    def __init__(self, ties: bool = True) -> None:
        nn.Module.__init__(self)
        self.inner = Inner()
        self.head = nn.Linear(4, 5, bias=False)
        self.initialize()
        if ties:
            self.head.weight = self.inner.embed.weight


@pytest.mark.parametrize("ties", [False, True])
def test_parts_are_initialized_in_the_order_of_their_constructors(ties: bool) -> None:
    torch.manual_seed(2)
    plain, after = Outer(ties), torch.rand(1)
    with torch.device("meta"):
        model = Outer(ties)
    torch.manual_seed(2)
    initialize_meta(model, mesh_for(3).data, place_absent(model, CPU))
    assert torch.equal(torch.rand(1), after)
    for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected), name
    assert (model.head.weight is model.inner.embed.weight) is ties


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
            self.one.copy_(torch.tensor(165))  # in one byte it is the value of what is not filled
            self.table.copy_(every)
        elif self.way == "by data":
            self.one.data.fill_(1)
            self.table.data.copy_(every)
        elif self.way == "anew":
            self.one, self.table = torch.ones_like(self.one), every


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32])
def test_a_buffer_is_filled_if_it_was_written(dtype: torch.dtype) -> None:
    for way in ("in place", "by data", "anew", None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), Kinds(dtype, way))
        given = place_absent(model, CPU)
        if way is not None:
            initialize_meta(model, mesh_for(3).data, given)
            assert torch.equal(model[1].table, torch.arange(256).to(dtype)), way
            continue
        with pytest.raises(ConfigError) as error:
            initialize_meta(model, mesh_for(3).data, given)
        assert "1.one (Kinds), 1.table (Kinds)" in str(error.value) and "1.none" not in str(error.value)


def test_a_mask_written_in_part_is_refused() -> None:
    with torch.device("meta"):
        model = Kinds(torch.bool, None)
    given = place_absent(model, CPU)
    model.one.fill_(True)
    model.table[:255] = True
    with pytest.raises(ConfigError) as error:
        initialize_meta(model, mesh_for(3).data, given)
    assert error.value.where == "initialize(model): table"


def test_classes_that_only_reset_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Inner())
    with caplog.at_level(logging.INFO, "zero_trial"):
        initialize_meta(model, mesh_for(3).data, place_absent(model, CPU))
    (message,) = [record.getMessage() for record in caplog.records if "reset_parameters" in record.getMessage()]
    assert message.count("Linear") == 1 and "LayerNorm" not in message  # Inner has initialized its own


class Own(nn.TransformerEncoder):
    """Layers of its own making, in the place of the copies."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])


class Renamed(nn.TransformerEncoder):
    """The layers that torch's constructor makes."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)


class Inherited(Renamed):
    pass


class Cloned(nn.TransformerEncoder):
    """Copies of its own making."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        self.layers = nn.ModuleList([copy.deepcopy(self.layers[0]) for _ in range(2)])


class Rewritten(nn.TransformerEncoder):
    """Writes values into layers that torch's constructor makes."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        for param in self.layers.parameters():
            nn.init.normal_(param)


class Built(nn.TransformerEncoder):
    """Layers of its own making, by a method."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        self.build()

    def build(self) -> None:
        self.layers = two_layers()


class ByName(nn.TransformerEncoder):
    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        made = [nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)]
        self._modules["layers"] = nn.ModuleList(made)


class ByVariableName(nn.TransformerEncoder):
    def __init__(self, name: str = "layers") -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        setattr(self, name, nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)]))


class Added(nn.TransformerEncoder):
    def __init__(self, name: str = "layers") -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        self.add_module(name, nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)]))


class Handed(nn.TransformerEncoder):
    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        give_layers(self)


class Cloning(nn.TransformerEncoder):
    """Copies by a function of another name."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        layer = nn.TransformerEncoderLayer(4, 2, 8)
        self.layers = nn.ModuleList([clone_of(layer) for _ in range(2)])


class CloningInside(nn.TransformerEncoder):
    def __init__(self) -> None:
        from copy import deepcopy as another

        super().__init__(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        layers = [nn.TransformerEncoderLayer(4, 2, 8)]
        layers.append(another(layers[0]))
        self.layers = nn.ModuleList(layers)


class Rich(nn.TransformerEncoder):
    """What constructors often do beside the layers."""

    def __init__(self, width: int = 4) -> None:
        super(Rich, self).__init__(nn.TransformerEncoderLayer(width, 2, 8), 2, enable_nested_tensor=False)  # noqa: UP008
        self.width = width
        self.register_buffer("places", torch.zeros(3), persistent=False)
        self.heads = nn.ModuleList([nn.Linear(self.width, 3) for _ in range(math.isqrt(4))])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.places.zero_()


class RichOwn(nn.TransformerEncoder):
    """Its own layers, appended one by one."""

    def __init__(self) -> None:
        nn.TransformerEncoder.__init__(self, nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        made = []
        for _ in range(2):
            made.append(nn.TransformerEncoderLayer(4, 2, 8))
        self.layers = nn.ModuleList(made)


clone_of = copy.deepcopy


def two_layers() -> nn.ModuleList:
    return nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])


def give_layers(model: nn.Module) -> None:
    model.layers = two_layers()


def encoder(*layers: nn.Module) -> nn.TransformerEncoder:
    """An encoder whose layers the caller has replaced."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
    if layers:
        model.layers = nn.ModuleList(layers)
    return model


@pytest.mark.parametrize(
    ("build", "copies"),
    [
        (encoder, True),
        (Own, False),
        (Renamed, True),
        (Inherited, True),
        (Rich, True),
        (RichOwn, False),
        (lambda: encoder(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8)), False),
        (lambda: encoder(nn.Linear(4, 4), nn.Linear(4, 2)), False),
        (lambda: encoder(*[nn.Linear(4, 4)] * 2), False),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 0, enable_nested_tensor=False), False),
    ],
)
def test_layers_that_torch_copies_are_copies_and_no_others(
    build: Callable[[], nn.TransformerEncoder], copies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(made := build())
    with caplog.at_level(logging.INFO, "zero_trial"):
        initialize_meta(model, mesh_for(3).data, place_absent(model, CPU))
    assert not any(bool(param.isnan().any()) for param in model.parameters())
    assert any("every layer in 0.layers gets" in record.getMessage() for record in caplog.records) == copies
    layers = [
        layer.self_attn.in_proj_weight for layer in cast(nn.ModuleList, made.layers) if hasattr(layer, "self_attn")
    ]
    assert not layers[1:] or torch.equal(*layers) == copies


@pytest.mark.parametrize(
    "build", [Cloned, Rewritten, Built, ByName, ByVariableName, Added, Handed, Cloning, CloningInside]
)
def test_layers_that_only_a_constructor_knows_are_refused(build: Callable[[], nn.TransformerEncoder]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(build())
    with pytest.raises(ConfigError) as caught:
        initialize_meta(model, mesh_for(3).data, place_absent(model, CPU))
    assert build.__name__ in caught.value.where and "zero.Init" in caught.value.fix
    given = nn.Sequential(build())
    initialize_meta(given, mesh_for(3).data, place_absent(given, CPU))  # has all values


def test_values_that_go_to_a_file_are_never_in_memory_together(tmp_path: Path) -> None:
    """One layer at a time, and the values are the same."""

    def values(keep: Any) -> tuple[int, list[torch.Tensor]]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        torch.manual_seed(3)
        before = anonymous()
        initialize_meta(model, mesh_for(1).data, place_absent(model, CPU), keep)
        return anonymous() - before, [param.detach() for param in model.parameters()]

    file = SwapFile(tmp_path, 40 << 20)
    grown, found = values(move_into(file))
    file.close()
    known = values(None)[1]
    assert all(map(torch.equal, found, known))
    assert grown < 8 << 20, "of 32 MiB"


def anonymous() -> int:
    """Bytes of this process that are its own."""
    give_freed_memory_back()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
