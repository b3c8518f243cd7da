"""Saving and resuming an engine: the same bits afterwards, on as many ranks and at whatever ZeRO
stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import differing, values_of
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.models import TinyLM, make_engine, tokens
from tests.support.pool import Pools, logged_lines
from zero_trial import zero
from zero_trial.errors import CheckpointError, StorageError, TrialError
from zero_trial.sharding.guards.freed import FreedParameter


class Net(nn.Module):
    """Dropout, running statistics of each rank's own data, a tied weight, frozen, small, scalar and
    empty parameters."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 11)
        self.norm = nn.BatchNorm1d(11) if norm else nn.Identity()
        self.blocks = nn.ModuleList([nn.Linear(11, 11) for _ in range(3)])
        self.blocks[2].weight = self.blocks[0].weight
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.last = nn.Linear(11, 4)
        self.register_buffer("turned", torch.rand(3, 2).t())
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for block in self.blocks:
            x = x + nn.functional.dropout(torch.tanh(block(x)), 0.3)
        return self.last(self.frozen(x) * self.scale)


def narrow() -> nn.Module:
    return Net(norm=False)


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return (model(turn.normal(4, 5)) - 1).float().square().mean()


ALL = {
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 3, "total_num_steps": 12, "warmup_max_lr": 0.01},
    },
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}}


def engine_of(stage: str, config: dict[str, Any], build: Any = Net, seed: int = 1, **kwargs: Any) -> zero_trial.Engine:
    case = Case(lambda: (torch.manual_seed(seed), build())[1], loss, config=config)
    return build_engine(case, STAGES[stage], **kwargs)


def train(engine: zero_trial.Engine, steps: range) -> list[tuple[float, float, float]]:
    """(loss, lr, loss scale) of every micro-batch; the gradient of step 2 and of step 4 overflows
    on rank 1 in fp16."""
    trace = []
    for step in steps:
        for number in range(engine.gradient_accumulation_steps()):
            value = loss(engine, Turn(step, number, engine.global_rank))
            bad = step in (2, 4) and engine.global_rank == 1 and engine.fp16_enabled()
            engine.backward(value * float("inf") if bad else value)
            engine.step()
            trace.append((value.item(), engine.get_lr()[0], engine.loss_scale))
    return trace


def counters(engine: zero_trial.Engine) -> tuple[int, ...]:
    return engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps


def resume(stage: str, config: dict[str, Any], folder: str, wide: bool) -> None:
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    build = Net if wide else narrow
    torch.manual_seed(100 + torch.distributed.get_rank())
    engine = engine_of(stage, config, build)
    torch.manual_seed(100 + engine.global_rank)
    train(engine, range(3))
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "a", 7: (1.5, None), "t": torch.arange(3)})
    at_save, count = values_of(engine), counters(engine)
    unbroken = train(engine, range(3, 6))

    again = engine_of(stage, config, build, seed=2)
    torch.manual_seed(999)
    path, client = again.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client is not None
    assert (client["epoch"], client["note"], client[7]) == (3, "a", (1.5, None))
    assert torch.equal(client["t"], torch.arange(3)) and counters(again) == count
    assert differing(at_save, values_of(again)) == [] and train(again, range(3, 6)) == unbroken
    assert counters(again) == counters(engine) and differing(values_of(engine), values_of(again)) == []


@pytest.mark.parametrize(
    ("stage", "fp16"), [*((stage, False) for stage in STAGES), ("zero1", True), ("zero3-free", True)]
)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(ranks: Pools, stage: str, fp16: bool, tmp_path: Path) -> None:
    ranks(2).run(resume, stage, ALL | FP16 if fp16 else ALL, str(tmp_path), not fp16)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        {"type": "NAdam", "params": {"lr": 0.01}},
        {"type": "Lamb", "params": {"lr": 0.01}},
        {"type": "Adafactor", "params": {"lr": 0.01}},
    ],
    ids=lambda optimizer: optimizer["type"],
)
def test_every_optimizers_state_is_resumed(ranks: Pools, optimizer: dict[str, Any], tmp_path: Path) -> None:
    whole = optimizer["type"] == "Adafactor"  # which steps on whole tensors
    config = {"optimizer": optimizer} | ({} if whole else {"bf16": {"enabled": True}})
    ranks(2).run(resume, "zero0" if whole else "zero3", config, str(tmp_path), False)


PLACES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1 rank zero0": (1, "zero0", {}),
    "1 rank zero3": (1, "zero3", {}),
    "2 ranks zero1": (2, "zero1", {}),
    "2 ranks zero3": (2, "zero3", {}),
    "4 ranks zero2": (4, "zero2", {}),
    "4 ranks hybrid": (4, "zero3-free", {"mesh": {"shard": 2, "replica": 2}}),
}
TRIANGLE = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": None,
    "bf16": {"enabled": True},
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [p for n, p in named if n.startswith("blocks")], "lr": 0.004},
        {"params": [p for n, p in named if not n.startswith("blocks")], "weight_decay": 0.1},
    ]


def engine_at(place: str, seed: int) -> zero_trial.Engine:
    _, stage, mesh = PLACES[place]
    torch.manual_seed(seed)
    model = narrow()
    config = {key: value for key, value in (TRIANGLE | mesh).items() if value is not None}
    config |= {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": STAGES[stage],
        "comm_timeout_seconds": 30.0,
    }
    return zero_trial.initialize(model=model, model_parameters=two_groups(model), config=config)[0]


def write(place: str, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_at(place, 1)
    train(engine, range(3))
    engine.save_checkpoint(folder, "here", client_state={"from": place})
    return values_of(engine)


def read(place: str, folder: str, saved: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    engine = engine_at(place, 2)
    train(engine, range(1))
    _, client = engine.load_checkpoint(folder, "here")
    wrong, steps = differing(saved, values_of(engine)), engine.global_steps
    lrs = engine.get_lr()
    for number in range(engine.gradient_accumulation_steps()):
        assert engine.is_gradient_accumulation_boundary() == (number + 1 == engine.gradient_accumulation_steps())
        engine.backward(loss(engine, Turn(3, number, engine.global_rank)))
        engine.step()
    assert engine.was_step_applied() and all(torch.isfinite(value).all() for value in values_of(engine).values())
    return wrong, steps, engine.global_steps, client, lrs


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_saved_anywhere_loaded_anywhere(ranks: Pools, number: int, tmp_path: Path) -> None:
    """Each place reads what the two before it and the one after it have written."""
    places = [*PLACES, *PLACES][number : number + len(PLACES)]
    saved = ranks(PLACES[source := places[0]][0]).run(write, source, str(tmp_path))[0]
    for target in (*places[1:3], places[-1]):
        for answer in ranks(PLACES[target][0]).run(read, target, str(tmp_path), saved):
            assert answer == ([], 3, 4, {"from": source}, [0.004, 0.01]), target


def parts(folder: str) -> None:
    """Weights only; weights and schedule; everything."""
    engine = engine_of("zero3", ALL)
    train(engine, range(3))
    engine.save_checkpoint(folder, "a")
    saved = values_of(engine)

    only = engine_of("zero1", ALL, seed=2)
    train(only, range(1))
    before, count, lr = values_of(only), counters(only), only.get_lr()
    only.load_checkpoint(folder, "a", load_module_only=True)
    after = values_of(only)
    assert differing(chosen(saved, "master", "param"), chosen(after, "master", "param")) == []
    assert differing(chosen(before, "exp"), chosen(after, "exp")) == []
    assert (counters(only), only.get_lr()) == (count, lr)

    fresh = engine_of("zero2", ALL, seed=2)
    fresh.load_checkpoint(folder, "a", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert differing(chosen(saved, "master", "param"), chosen(values_of(fresh), "master", "param")) == []
    assert not any(name.startswith("exp") for name in values_of(fresh)) and fresh.global_steps == 3
    assert fresh.get_lr() != engine.get_lr()
    train(fresh, range(3, 4))

    bare = engine_of("zero1", {"optimizer": None}, seed=2)  # evaluation only: no optimizer at all
    bare.load_checkpoint(folder)
    assert differing(chosen(saved, "param"), chosen(values_of(bare), "param")) == []


def chosen(found: dict[str, torch.Tensor], *kinds: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if name.startswith(kinds)}


def test_parts_of_a_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(parts, str(tmp_path))


def message(act: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        act()
    return str(raised.value)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(11, 3)
        self.last = nn.Linear(11, 7)


class Smaller(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.first.bias
        self.first.register_parameter("bias", None)


def refusals(folder: str) -> dict[str, str]:
    engine = engine_of("zero3", ALL)
    train(engine, range(1))
    assert engine.load_checkpoint(folder + "/none") == (None, None)
    engine.save_checkpoint(folder, "one")
    found = {"no such tag": message(lambda: engine.load_checkpoint(folder, "two"), CheckpointError)}
    wider = engine_of("zero2", ALL, Wider)
    found["wider"] = message(lambda: wider.load_checkpoint(folder, "one"), CheckpointError)
    smaller = engine_of("zero2", ALL, Smaller)
    found["smaller"] = message(lambda: smaller.load_checkpoint(folder, "one"), CheckpointError)
    smaller.load_checkpoint(folder, "one", load_module_strict=False)
    train(smaller, range(1, 2))
    sgd = engine_of("zero2", ALL | {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})
    found["other optimizer"] = message(lambda: sgd.load_checkpoint(folder, "one"), CheckpointError)
    sgd.load_checkpoint(folder, "one", load_optimizer_states=False)
    train(sgd, range(1, 2))
    torch.manual_seed(1)
    model = Net()
    groups = [
        {"params": [model.first.weight]},
        {"params": [p for p in model.parameters() if p is not model.first.weight]},
    ]
    grouped = engine_of("zero2", ALL, lambda: model, model_parameters=groups)
    found["other groups"] = message(lambda: grouped.load_checkpoint(folder, "one"), CheckpointError)
    engine.backward(loss(engine, Turn(1, 0, 0)))
    engine.step()
    engine.save_checkpoint(folder, "mid")  # of the last step, with a warning
    engine.backward(loss(engine, Turn(1, 1, 0)))
    engine.step()
    bad = {"bad": object()} if engine.global_rank == 1 else {}
    found["client state"] = message(lambda: engine.save_checkpoint(folder, "state", client_state=bad), CheckpointError)
    found["tag"] = message(lambda: engine.save_checkpoint(folder, "a/b"), CheckpointError)
    place = f"{folder}/one/manifest.json"
    found["a file"] = message(lambda: engine.save_checkpoint(place, "x"), CheckpointError).replace(place, "FILE")
    engine.save_checkpoint(folder, "last")
    return found


def test_refusals_say_what_and_leave_the_engine_working(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(refusals, str(tmp_path))
    assert {name: text for name, text in first.items() if name != "client state"} == {
        name: text for name, text in second.items() if name != "client state"
    }
    assert "'two'" in first["no such tag"] and "one" in first["no such tag"].split("one of")[1]
    for word in ("extra.weight", "last.weight"):
        assert word in first["wider"]
    assert "first.bias" in first["smaller"]
    for text in (first["other optimizer"], first["other groups"]):
        assert "load_optimizer_states=False" in text
    assert first["a file"].startswith("FILE/x: the checkpoint was not saved: got rank 0: NotADirectoryError")
    assert first["a file"].endswith("Save to a writable folder with free space. Earlier checkpoints are unaffected.")
    assert "Adam" in first["other optimizer"] and "SGD" in first["other optimizer"]
    assert "client" in first["client state"] and "client" in second["client state"] and "'a/b'" in first["tag"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "mid", "one"]


@pytest.mark.parametrize("name", ["run", "checkpoint-2"])  # a folder of Trainer's is next to those of its other steps
def test_another_run_in_the_folder_is_named_once_per_checkpoint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was there before, and what another engine of this process saves, is no other run."""
    folder = tmp_path / name
    theirs = tmp_path / "checkpoint-1" if name == "checkpoint-2" else folder

    def saved_by_another(tag: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("zero_trial.engine.saving.this_run", lambda: "process 7 on node-b")
            engine_of("zero0", {}).save_checkpoint(theirs, tag)

    saved_by_another("before")
    caplog.clear()
    time.sleep(0.02)  # the clock of the files is coarse
    first, second = engine_of("zero0", {}), engine_of("zero0", {})
    for tag in ("a", "b"):
        first.save_checkpoint(folder, f"first-{tag}")
        second.save_checkpoint(folder, f"second-{tag}")
    assert "another run" not in caplog.text
    saved_by_another("meanwhile")
    caplog.clear()
    first.save_checkpoint(folder, "first-c")
    first.save_checkpoint(folder, "first-d")
    (line,) = [text for text in caplog.messages if "another run" in text]
    assert line.startswith(
        f"{theirs / 'meanwhile'} was saved by another run (process 7 on node-b) while this one (process "
    )


def tags(folder: str) -> list[Any]:
    engine = engine_of("zero1", {})
    train(engine, range(1))
    engine.save_checkpoint(folder)
    first = zero.safe_get_full_fp32_param(engine.module.last.bias)
    train(engine, range(1, 2))
    engine.save_checkpoint(folder, "named", save_latest=False)
    train(engine, range(2, 3))
    engine.save_checkpoint(folder, "named")  # replaces
    newest = zero.safe_get_full_fp32_param(engine.module.last.bias)
    found = [sorted(path.name for path in Path(folder).iterdir())]
    path, _ = engine.load_checkpoint(folder)
    found += [Path(path or "").name, torch.equal(newest, zero.safe_get_full_fp32_param(engine.module.last.bias))]
    engine.load_checkpoint(folder, "global_step1")
    found += [engine.global_steps, torch.equal(first, zero.safe_get_full_fp32_param(engine.module.last.bias))]
    lines = logged_lines(logging.WARNING)
    engine.backward(loss(engine, Turn(1, 0, 0)))
    engine.save_checkpoint(folder)  # as a run that begins again in the folder of an earlier one
    engine.load_checkpoint(folder)
    for text in ("after 1 backward passes without a step", "'global_step1' was saved later"):
        found.append(sum(text in line for line in lines) == (engine.global_rank == 0))
    torch.distributed.barrier()
    if engine.global_rank == 0:  # the newest is damaged: the one before is taken
        shard = next((Path(folder) / "named").glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-3] + b"abc")
    torch.distributed.barrier()
    path, _ = engine.load_checkpoint(folder)
    found.append(Path(path or "").name)
    found.append("named" in message(lambda: engine.load_checkpoint(folder, "named"), CheckpointError))
    return found


def test_tags(ranks: Pools, tmp_path: Path) -> None:
    expected = [["global_step1", "named"], "named", True, 1, True, True, True, "global_step1", True]
    assert ranks(2).run(tags, str(tmp_path)) == [expected] * 2


def lend_nothing(folder: str, when: str) -> tuple[list[str], float]:
    """Saves and loads with a disk of rank 1 that does not give its state, or does not take it back;
    then with one that does."""
    engine = engine_of("zero2", {})
    train(engine, range(1))
    engine.save_checkpoint(folder, "before")
    good = engine.optimizer.state_by_tensor.lent

    @contextmanager
    def broken() -> Iterator[None]:
        if when == "at the start" and engine.global_rank == 1:
            raise StorageError("the disk failed")
        yield
        if engine.global_rank == 1:
            raise StorageError("the disk failed")

    engine.optimizer.state_by_tensor.lent = broken
    begin = time.monotonic()
    texts = [
        message(lambda: engine.save_checkpoint(folder, "now"), CheckpointError),
        message(lambda: engine.load_checkpoint(folder, "before"), CheckpointError),
    ]
    seconds = time.monotonic() - begin
    engine.optimizer.state_by_tensor.lent = good
    train(engine, range(1, 2))
    engine.save_checkpoint(folder, "after")
    return texts, seconds


@pytest.mark.parametrize("when", ["at the start", "at the end"])
def test_a_disk_of_one_rank_that_fails_ends_a_save_on_all(ranks: Pools, when: str, tmp_path: Path) -> None:
    """No rank waits for a collective that the other one never reaches."""
    for texts, seconds in ranks(2).run(lend_nothing, str(tmp_path), when):
        assert texts == ["the disk failed."] * 2
        assert seconds < 25  # the time limit of a collective is 30
    assert (tmp_path / "after/manifest.json").exists() and (tmp_path / "now").exists() == (when == "at the end")


class Grown(nn.Module):
    """A running mean under ``name``: its values differ between ranks, so each rank saves its
    own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer(name, torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def buffer_renamed(folder: str) -> str:
    first = engine_of("zero1", {}, lambda: Grown("mean"))
    first.module.mean.fill_(float(first.global_rank))
    first.save_checkpoint(folder)
    second = engine_of("zero1", {}, lambda: Grown("average"))
    path, _ = second.load_checkpoint(folder, load_module_strict=False)
    return Path(path or "").name


def test_a_buffer_that_the_model_has_no_more_is_left_out_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Only rank 1 has saved a value of its own, so only rank 1 would fail while rank 0 waited."""
    assert ranks(2).run(buffer_renamed, str(tmp_path)) == ["global_step0"] * 2


class Lora(nn.Module):
    """A frozen layer with two low-rank factors beside it."""

    def __init__(self, rank: int, target: str) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.add_module(target, nn.Sequential(nn.Linear(6, rank, bias=False), nn.Linear(rank, 6, bias=False)))
        self.target = target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.get_submodule(self.target)(x)
        return found.square().mean()


def lora(stage: str, seed: int, rank: int = 2, target: str = "adapter") -> zero_trial.Engine:
    return make_engine(lambda: Lora(rank, target), {"zero_optimization": STAGES[stage]}, seed=seed)


def adapter_round_trip(folder: str, saved_at: str, loaded_at: str) -> None:
    first, second = lora(saved_at, 1), lora(loaded_at, 2)
    first.backward(first(torch.ones(4, 6)))
    first.step()
    first.save_checkpoint(folder, tag="adapter", exclude_frozen_parameters=True)
    base = {name: value.clone() for name, value in second.module_state_dict().items() if name.startswith("base")}
    assert second.load_checkpoint(folder, tag="adapter")[0] is not None
    expected = {name: value for name, value in first.module_state_dict().items() if name not in base} | base
    found = second.module_state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(first.module_state_dict()["base.weight"], base["base.weight"]) and second.global_steps == 1
    second.backward(second(torch.ones(4, 6)))
    second.step()


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "size"), [("zero2", "zero3-free", 1), ("zero3", "zero1", 1), ("zero3", "zero3", 2)]
)
def test_a_checkpoint_without_frozen_parameters_loads_strictly(
    ranks: Pools, tmp_path: Path, saved_at: str, loaded_at: str, size: int
) -> None:
    ranks(size).run(adapter_round_trip, str(tmp_path), saved_at, loaded_at)


def consolidated() -> list[Any]:
    """At stage 3 in bf16: what rank 0 gets, and whether whole parameters are freed when asked."""
    free = STAGES["zero3"] | {"stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(TinyLM, {"zero_optimization": free, "bf16": {"enabled": True}})
    weight = engine.module.get_parameter("blocks.1.up.weight")
    with torch.no_grad():
        engine(tokens(0, 2))
    kept = not isinstance(weight, FreedParameter)
    engine.empty_partition_cache()
    freed = isinstance(weight, FreedParameter)
    for param in engine.module.blocks[0].parameters():
        param.requires_grad_(False)
    state = engine._zero3_consolidated_16bit_state_dict()
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    expected = engine.module_state_dict()
    if engine.mesh.rank:
        return [kept, freed, state is None and trained is None]
    good = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    good &= all(value.dtype == torch.bfloat16 and value.device.type == "cpu" for value in state.values())
    good &= state["head.weight"] is state["embed.weight"]
    good &= state.keys() - trained.keys() == {name for name in state if name.startswith("blocks.0")}
    return [kept, freed, good and engine.zero_gather_16bit_weights_on_model_save()]


def test_the_whole_model_on_rank_0_for_libraries(ranks: Pools) -> None:
    assert ranks(2).run(consolidated) == [[True, True, True]] * 2


def _opened(engine: zero_trial.Engine) -> None:
    with zero.GatheredParameters(list(engine.module.norm.parameters())):
        pass


USES_OF_ALL_RANKS: dict[str, Callable[[zero_trial.Engine, Path], object]] = {
    "forward": lambda engine, folder: engine(tokens(0, 2)),
    "GatheredParameters": lambda engine, folder: _opened(engine),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
}


def saved_by_one_rank(use: str, folder: Path) -> None:
    """After a consolidation ranks ask alone for state dicts, until all use the model again."""
    engine = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    expected = engine.module_state_dict()
    engine._zero3_consolidated_16bit_state_dict()
    alone, prefix = (engine.module, "") if engine.mesh.rank else (engine.module.blocks[1], "blocks.1.")
    state = alone.state_dict(prefix=prefix)
    assert state.keys() == {name for name in expected if name.startswith(prefix)}
    assert all(value.shape == expected[name].shape for name, value in state.items())
    with pytest.raises(TrialError, match="GatheredParameters"):
        next(iter(state.values())).clone()
    USES_OF_ALL_RANKS[use](engine, folder)
    again = engine.module.blocks[1].state_dict(prefix="blocks.1.")
    assert all(torch.isfinite(value).all() for value in again.values())
    assert torch.equal(again["blocks.1.up.weight"], expected["blocks.1.up.weight"])


@pytest.mark.parametrize("use", USES_OF_ALL_RANKS)
def test_one_rank_alone_asks_for_state_dicts_while_it_saves(ranks: Pools, use: str, tmp_path: Path) -> None:
    ranks(2).run(saved_by_one_rank, use, tmp_path)
