"""What a model on the meta device consists of before and after it gets values."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    initialize_meta(model, mesh_for(3).data)
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
        elif self.way == "in part":
            self.one.fill_(True)
            self.table[:255] = True
        elif self.way == "anew":
            self.one, self.table = torch.ones_like(self.one), every


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32])
def test_a_buffer_is_filled_if_it_was_written(dtype: torch.dtype) -> None:
    for way in ("in place", "by data", "anew", None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), Kinds(dtype, way))
        if way is not None:
            initialize_meta(model, mesh_for(3).data)
            assert torch.equal(model[1].table, torch.arange(256).to(dtype)), way
            continue
        with pytest.raises(ConfigError) as error:
            initialize_meta(model, mesh_for(3).data)
        assert "1.one (Kinds), 1.table (Kinds)" in str(error.value) and "1.none" not in str(error.value)


def test_a_mask_written_in_part_is_refused() -> None:
    with torch.device("meta"):
        model = Kinds(torch.bool, "in part")
    with pytest.raises(ConfigError) as error:
        initialize_meta(model, mesh_for(3).data)
    assert error.value.where == "initialize(model): table"


class Asking(nn.Module):
    """Only its constructor knows what to reset with, unless there is a default."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))

    def reset_parameters(self, value: float) -> None:
        nn.init.constant_(self.scale, value)


class Defaulting(Asking):
    def reset_parameters(self, value: float = 2.0) -> None:
        super().reset_parameters(value)


def test_a_method_that_needs_arguments_resets_nothing() -> None:
    with torch.device("meta"):
        known, unknown = Defaulting(), nn.Sequential(nn.Linear(2, 2), Asking())
    initialize_meta(known, mesh_for(3).data)
    assert torch.equal(known.scale, torch.full((3,), 2.0))
    with pytest.raises(ConfigError) as error:
        initialize_meta(unknown, mesh_for(3).data)
    assert error.value.where == "initialize(model): 1.scale"


def test_classes_that_only_reset_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Inner())
    with caplog.at_level(logging.INFO, "zero_trial"):
        initialize_meta(model, mesh_for(3).data)
    (message,) = [record.getMessage() for record in caplog.records if "reset_parameters" in record.getMessage()]
    assert message.count("Linear") == 1 and "LayerNorm" not in message  # Inner has initialized its own


class Drawn(nn.Module):
    """A constructor that draws, as that of transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.weight)


class Made(nn.Module):
    """As many models of transformers make the token that they put in front."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Drawing(nn.Module):
    """Children that an ``_init_weights`` fills anew."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds for _ in range(2))
        self.after = nn.Linear(3, 2)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "weight"):
            nn.init.ones_(module.weight) if isinstance(module, Ones) else nn.init.normal_(module.weight)


@pytest.mark.parametrize("kinds, named", [((Drawn,), "Drawn"), ((Ones, Made, Drawn), "Drawn, Made"), ((Ones,), "")])
def test_constructors_whose_draws_are_not_repeated_are_named(
    kinds: tuple[type[nn.Module], ...], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And only those: others have the bits of a model that is built on the host."""
    torch.manual_seed(3)
    plain = Drawing(*kinds)
    with torch.device("meta"):
        model = Drawing(*kinds)
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO, "zero_trial"):
        initialize_meta(model, mesh_for(3).data)
    lines = [text for record in caplog.records if "constructors of" in (text := record.getMessage())]
    assert len(lines) == bool(named) and all(f"constructors of {named} draw" in line for line in lines)
    same = [torch.equal(value, other) for value, other in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(same) is not bool(named)


def test_transformers_models_are_named_where_their_bits_differ(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "": transformers.LlamaConfig(**sizes, intermediate_size=8),
        "Conv1D": transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=4, vocab_size=11),
    }
    for named, config in models.items():
        torch.manual_seed(3)
        plain = transformers.AutoModelForCausalLM.from_config(config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        torch.manual_seed(3)
        caplog.clear()
        with caplog.at_level(logging.INFO, "zero_trial"):
            initialize_meta(model, mesh_for(3).data)
        lines = [text for record in caplog.records if "constructors of" in (text := record.getMessage())]
        assert len(lines) == bool(named) and all(f"constructors of {named} draw" in line for line in lines)
        same = map(torch.equal, model.parameters(), plain.parameters())
        assert all(same) is not bool(named)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 8)


def encoder(*layers: nn.Module, kind: type[nn.TransformerEncoder] = nn.TransformerEncoder) -> nn.TransformerEncoder:
    """An encoder of copies, or of ``layers`` that the caller has put in their place."""
    model = kind(layer(), 2, enable_nested_tensor=False)
    if layers:
        model.layers = nn.ModuleList(layers)
    return model


class Plain(nn.TransformerEncoder):
    """A subclass with torch's constructor."""

    def reset_parameters(self) -> None:
        """Does nothing to the layers."""


class Own(nn.TransformerEncoder):
    """Layers of its own making, in the place of the copies."""

    def __init__(self) -> None:
        super().__init__(layer(), 1, enable_nested_tensor=False)
        self.layers = nn.ModuleList([layer(), layer()])


class Renamed(nn.TransformerEncoder):
    """The layers that torch's constructor makes, which only its own constructor knows."""

    def __init__(self) -> None:
        super().__init__(layer(), 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)


class Inherited(Renamed):
    pass


def written() -> nn.TransformerEncoder:
    model = encoder()
    for param in model.layers[1].parameters():
        nn.init.normal_(param)
    return model


class Around(nn.Module):
    """Writes to the layers of its encoders after torch's constructor.

    Args:
        how: "matrices" of all layers, or "biases" of one; None: not in this constructor.
    """

    def __init__(self, how: str | None, count: int = 1) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoder() for _ in range(count))
        self.head = nn.Linear(4, 3)
        if how == "matrices":
            for param in self.parameters():
                if param.dim() > 1:
                    nn.init.xavier_uniform_(param)
        elif how == "biases":
            nn.init.ones_(self.encoders[0].layers[1].linear1.bias)


class Applied(Around):
    """Its constructor applies an initializer, and perhaps writes before or after it."""

    def __init__(self, how: str | None, count: int = 1) -> None:
        super().__init__(how, count)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.02)


class Scaled(nn.Module):
    """A layer with a tensor that its constructor does not write, but ``reset_parameters`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


def given_in_part() -> nn.TransformerEncoder:
    model = encoder()
    model.layers[1].linear1.bias = nn.Parameter(torch.ones(8, device="cpu"))
    return model


def moved() -> nn.Module:
    with torch.device("cpu"):
        model = nn.Sequential(written(), nn.Linear(2, 2))
    return model.to("meta")


def rewritten() -> nn.Transformer:
    model = nn.Transformer(4, 2, 2, 2, 8)
    model._reset_parameters()
    return model


def of_one_layer() -> nn.ModuleList:
    shared = layer()
    return nn.ModuleList([nn.TransformerEncoder(shared, 2, enable_nested_tensor=False) for _ in range(2)])


def beside_its_layer() -> nn.ModuleList:
    return nn.ModuleList([shared := layer(), nn.TransformerEncoder(shared, 2, enable_nested_tensor=False)])


@pytest.mark.parametrize(
    ("build", "copies"),
    [
        (encoder, ["0.layers"]),
        (lambda: encoder(kind=Plain), ["0.layers"]),
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 3), ["0.layers"]),
        (lambda: nn.Transformer(4, 2, 2, 3, 8), ["0.encoder.layers", "0.decoder.layers"]),
        (lambda: Applied(None), ["0.encoders.0.layers"]),
        (lambda: nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False), []),
        (lambda: nn.TransformerEncoder(nn.Identity(), 2, enable_nested_tensor=False), []),
    ],
)
def test_layers_that_torch_copies_have_the_dense_values(
    build: Callable[[], nn.Module], copies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(4)
    dense = nn.Sequential(build(), nn.Linear(4, 4))
    with torch.device("meta"):
        model = nn.Sequential(build(), nn.Linear(4, 4))
    torch.manual_seed(4)
    with caplog.at_level(logging.INFO, "zero_trial"):
        initialize_meta(model, mesh_for(3).data)
    for (name, value), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(value, expected), name
    said = [record.getMessage() for record in caplog.records if "the first one's values" in record.getMessage()]
    assert [f"every layer in {', '.join(copies)} gets" in message for message in said] == [True][: len(copies)]


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (Own, "constructor of its own"),
        (Renamed, "constructor of its own"),
        (Inherited, "constructor of its own"),
        (lambda: encoder(layer(), layer()), "made or written"),
        (lambda: encoder(copy.deepcopy(layer()), layer()), "made or written"),
        (written, "made or written"),
        (lambda: encoder(layer(), nn.Linear(4, 4)), "not alike"),
        (lambda: Around("matrices"), "made or written"),
        (lambda: Around("biases"), "made or written"),
        (lambda: Applied("matrices"), "made or written"),
        (lambda: Applied("biases"), "made or written"),
        (lambda: encoder(Scaled(), Scaled()), "made or written"),
        (rewritten, "made or written"),
        (of_one_layer, "layers like 0.1.layers.0: two encoders of one shape"),
        (lambda: Applied(None, 2), "layers like 0.encoders.1.layers.0: two encoders of one shape"),
        (beside_its_layer, "layers like 0.0"),
    ],
)
def test_layers_whose_first_values_cannot_be_known_are_refused(build: Callable[[], nn.Module], got: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(build(), nn.Linear(2, 2))
    with pytest.raises(ConfigError) as caught:
        initialize_meta(model, mesh_for(3).data)
    assert got in caught.value.got and "zero.Init" in caught.value.fix
    given = nn.Sequential(build())
    initialize_meta(given, mesh_for(3).data)  # has all values


def test_layers_that_lack_a_buffer_alone_are_filled() -> None:
    """As load_state_dict(assign=True) leaves those which no state dict holds."""
    model = nn.Sequential(nn.TransformerEncoder(Kinds(torch.float32, "in place"), 2, enable_nested_tensor=False))
    for part in model[0].layers.children():
        part.weight = nn.Parameter(torch.ones(3))
        part.table = torch.zeros(256, device="meta")
    initialize_meta(model, mesh_for(3).data)
    assert all(torch.equal(part.table, torch.arange(256.0)) for part in model[0].layers.children())


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (given_in_part, "values for 1 of the 24 tensors"),
        (lambda: copy.deepcopy(nn.Sequential(written(), nn.Linear(2, 2))), "no write is known"),
        (moved, "no write is known"),
    ],
)
def test_layers_that_the_meta_device_tells_nothing_of_are_refused(build: Callable[[], nn.Module], got: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError) as caught:
        initialize_meta(model, mesh_for(3).data)
    assert got in caught.value.got and "zero.Init" in caught.value.fix


def test_values_that_go_to_a_file_are_never_in_memory_together(tmp_path: Path) -> None:
    """One layer at a time, and the values are the same."""

    def values(keep: Any) -> tuple[int, list[torch.Tensor]]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        torch.manual_seed(3)
        before = anonymous()
        initialize_meta(model, mesh_for(1).data, keep)
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
