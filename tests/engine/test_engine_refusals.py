"""What users do wrong with an engine: one typed error that says where, what was got, what was
expected, and how to fix it."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import zero_trial
from tests.support.dense import STAGES, Case, build_engine
from tests.support.pool import Pools, RankPool
from zero_trial.comm import waits
from zero_trial.errors import ConfigError, DataError, MeshError, TrialError, ZeroTrialError
from zero_trial.pipeline import LayerSpec, PipelineModule

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def engine(config: dict[str, Any] | None = None, model: nn.Module | None = None, **kwargs: Any) -> zero_trial.Engine:
    return zero_trial.initialize(model=model or net(), config=CONFIG | (config or {}), **kwargs)[0]


def output(**kwargs: Any) -> tuple[zero_trial.Engine, torch.Tensor]:
    found = engine(**kwargs)
    return found, found(torch.ones(5, 3))


def of_loss(loss: Callable[[torch.Tensor], Any], **kwargs: Any) -> None:
    found, out = output(**kwargs)
    found.backward(loss(out))


class Replicated(nn.parallel.DistributedDataParallel):
    """A user's subclass, without the process group that a real one needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def in_two_groups() -> None:
    model = net()
    groups = [{"params": list(model.parameters())}, {"params": [model[0].weight], "lr": 1.0}]  # type: ignore[index]
    engine(model=model, model_parameters=groups)


def of_another_model(as_optimizer: bool) -> None:
    """Left out silently, a criterion's own parameters would never be trained."""
    model, criterion = net(), nn.Linear(2, 1)
    params = [*model.parameters(), *criterion.parameters()]
    engine(model=model, **({"optimizer": torch.optim.AdamW(params)} if as_optimizer else {"model_parameters": params}))


def optimizer_that_has_stepped() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine(model=model, optimizer=optimizer)


def batch_size_in_a_step() -> None:
    found = engine({"train_micro_batch_size_per_gpu": 2})
    found.backward(found(torch.ones(2, 3)).mean())
    found.step()
    found.set_train_batch_size(8)


class Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def two_in_one_memory() -> None:
    found = engine(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    found.backward(found(torch.ones(2, 3)).mean())
    found.module[0].weight.data = found.module[1].weight.data
    found.step()


def edit_through_data_in_a_stage_3_forward() -> None:
    """torch counts no version for it, and the values are freed."""
    found = engine(FREED)

    def clamp(module: nn.Module, _: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]

    found.module[0].register_forward_pre_hook(clamp)
    found.backward(found(torch.ones(2, 3)).mean())
    found.step()


def second_engine(held: bool) -> None:
    """A notebook's cell that runs again."""
    model = net()
    first = engine(FREED, model)
    if not held:
        del first
    engine(FREED, model)


def with_grad_scaler() -> None:
    found, out = output()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(out.mean()).backward()  # type: ignore[no-untyped-call]
    scaler.step(found.optimizer)  # type: ignore[arg-type]


FREED = {"zero_optimization": STAGES["zero3-free"]}
NO_SCALAR = ("engine.backward", "not a scalar")
GIVEN = {"training_data": [torch.ones(3)] * 8, "dataset": [torch.ones(3)] * 8}
REFUSALS: list[tuple[type[ZeroTrialError], Callable[[], Any], tuple[str, ...]]] = [
    (ConfigError, lambda: engine(model=Replicated(net())), ("DataParallel", "initialize(model):", "Pass model.module")),
    (
        ConfigError,
        lambda: engine(model=nn.Sequential(nn.Identity(), nn.DataParallel(net()))),
        ("initialize(model): 1:",),
    ),
    (TrialError, lambda: of_loss(lambda out: out), (*NO_SCALAR, "(5, 2)", "loss.mean()")),
    (TrialError, lambda: of_loss(lambda out: out.mean().item()), (*NO_SCALAR, "float", "Remove .item()")),
    (
        TrialError,
        lambda: of_loss(lambda out: (out.mean(), out)),
        (*NO_SCALAR, "tuple", "from the model's output"),
    ),
    (TrialError, lambda: of_loss(lambda out: None), (*NO_SCALAR, "NoneType", "from the model's output")),
    (TrialError, lambda: of_loss(lambda out: out.mean().detach()), ("does not require grad", "gradients enabled")),
    (
        TrialError,
        lambda: of_loss(torch.mean, config={"optimizer": None}, model=net().requires_grad_(False)),
        ("does not require grad",),
    ),
    (TrialError, lambda: engine(model=net().requires_grad_(False)), ("got Sequential with 4", "requires_grad_(True)")),
    (TrialError, lambda: engine(model_parameters=[]), ("nothing to train", "4 of them trainable", "model_parameters")),
    (TrialError, lambda: engine({"optimizer": None}).step(), ("there is no optimizer", '"optimizer"')),
    (
        ConfigError,
        lambda: engine({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}),
        ("gradient_clipping",),
    ),
    (ConfigError, lambda: engine({"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}), ("steps",)),
    (ConfigError, in_two_groups, ("two optimizer groups", "model_parameters")),
    (ConfigError, lambda: of_another_model(True), ("2 trainable parameters", "optimizer")),
    (ConfigError, lambda: of_another_model(False), ("2 trainable parameters", "model_parameters")),
    (ConfigError, optimizer_that_has_stepped, ("has stepped",)),
    (ConfigError, lambda: zero_trial.initialize(model=net()), ("no ds_config", "args.deepspeed_config")),
    (ConfigError, lambda: engine(config_params=CONFIG), ("config and config_params",)),
    (ConfigError, lambda: engine(net=net()), ("model and net",)),
    (ConfigError, lambda: engine(**GIVEN), ("training_data and dataset",)),
    (ConfigError, lambda: zero_trial.initialize(config=CONFIG), ("needs a model",)),
    (ConfigError, lambda: zero_trial.initialize(net(), CONFIG), ("args, as in DeepSpeed", "initialize(model=...")),  # type: ignore[arg-type]
    (DataError, lambda: engine(training_data=DataLoader([torch.ones(3)] * 8)), ("a DataLoader", "Give loader.dataset")),
    (TrialError, lambda: torch.save(engine(), io.BytesIO()), ("cannot be pickled", "engine.save_checkpoint")),
    (TrialError, lambda: copy.deepcopy(engine()), ("cannot be pickled or copied",)),
    (TrialError, with_grad_scaler, ("engine.step() instead", "and a GradScaler")),
    (TrialError, lambda: engine().load_checkpoint("x", custom_load_fn=print), ("custom_load_fn", "GatheredParameters")),
    (TrialError, batch_size_in_a_step, ("between steps",)),
    (ConfigError, lambda: engine(model=Complex()), ("phase: a complex parameter", "view_as_real")),
    (TrialError, two_in_one_memory, ("1.weight", "memory of 0.weight")),
    (TrialError, edit_through_data_in_a_stage_3_forward, ("0.weight", "GatheredParameters")),
    (ConfigError, lambda: second_engine(True), ("belongs to another engine", "destroy()")),
    (ConfigError, lambda: second_engine(False), ("belongs to another engine", "destroy()")),
]


@pytest.mark.parametrize(("kind", "act", "words"), REFUSALS)
def test_what_is_refused(kind: type[ZeroTrialError], act: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as raised:
        act()
    assert raised.value.exit_code == 2
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("lazy", "where"), [(nn.LazyLinear(4), "1.weight: "), (nn.LazyBatchNorm1d(affine=False), "1.running_mean: ")]
)
def test_a_lazy_module_needs_a_forward_first(lazy: nn.Module, where: str) -> None:
    model = nn.Sequential(nn.Identity(), lazy)
    with pytest.raises(ConfigError, match=rf"{where}.*got Uninitialized.* of {type(lazy).__name__}.*Run one forward"):
        engine(model=model)
    model(torch.ones(2, 3))
    model.append(net()[0] if where.startswith("1.running") else nn.Identity())  # type: ignore[index]
    engine(model=model).destroy()


def test_a_refused_loss_leaves_the_engine_working() -> None:
    """A loss of one element is a scalar."""
    found, out = output()
    with pytest.raises(TrialError):
        found.backward(out)
    found.backward(out.mean().reshape(1, 1))
    found.step()
    assert found.was_step_applied()


@pytest.mark.parametrize("scheduled", ["client", "ds_config"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_schedule_stepped_by_hand_as_well_is_logged_once(
    scheduled: str, by_hand: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs: dict[str, Any] = {"lr_scheduler": lambda own: torch.optim.lr_scheduler.StepLR(own, 2)}
    if scheduled == "ds_config":
        kwargs = {"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}}
    found = engine(**kwargs)
    for step in range(6):
        found.backward(found(torch.ones(4, 3)).mean())
        found.step()
        if step == 1:
            found.save_checkpoint(str(tmp_path))
        elif step == 3:  # takes the schedule back
            found.load_checkpoint(str(tmp_path))
        if by_hand:
            found.lr_scheduler.step()
    assert caplog.text.count("stepped between two steps of the engine") == by_hand


def test_a_layer_that_the_optimizer_lacks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    engine(model=model, optimizer=optimizer).destroy()
    assert "will not be trained" not in caplog.text
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.append(nn.Linear(2, 2))  # type: ignore[operator]
    engine(model=model, optimizer=optimizer)
    assert "in no group of the optimizer will not be trained: 2 (3.weight ...)" in caplog.text


class Args:
    deepspeed_config = CONFIG


def test_where_the_configuration_may_be_given() -> None:
    for args in (Args(), SimpleNamespace(deepspeed_config=None, deepscale_config=CONFIG)):
        assert zero_trial.initialize(args=args, model=net())[0].train_batch_size() == 4
    assert zero_trial.initialize(model=net(), config_params=CONFIG)[0].train_batch_size() == 4


def test_a_config_beside_that_of_the_arguments_counts_and_it_is_said() -> None:
    """Determined's pipeline example reads the file of its arguments, changes it, and passes
    both."""
    changed = zero_trial.initialize(args=Args(), model=net(), config={**CONFIG, "train_batch_size": 8})[0]
    assert changed.train_batch_size() == 8 and "args.deepspeed_config" in changed.config.warnings[-1]
    same = zero_trial.initialize(args=Args(), model=net(), config=dict(CONFIG))[0]
    assert same.config.warnings == zero_trial.initialize(model=net(), config=CONFIG)[0].config.warnings


def bounded(kind: str, stage: str) -> str:
    """Take a step with other tokens on each rank; return the error, or weights that differ."""
    torch.manual_seed(0)
    layer = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}[kind.removeprefix("frozen ")](6, 4, max_norm=0.5)
    model = nn.Sequential(layer, nn.Linear(4, 2))
    model[0].requires_grad_(not kind.startswith("frozen"))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        found = zero_trial.initialize(model=model, config=CONFIG | {"zero_optimization": STAGES[stage]})[0]
    except ConfigError as error:
        return str(error)
    tokens = torch.full((4 // world, 1), rank)
    found.backward(found(tokens).mean())
    found.step()
    trained = [param.flatten().tolist() for param in model.parameters() if param.requires_grad]
    rows = found.mesh.data.gather_json(trained, "weights")
    found.destroy()
    return "" if all(row == rows[0] for row in rows) else f"the ranks are apart: {rows}"


@pytest.mark.parametrize(
    ("size", "stage", "kind"),
    [
        *((1, "zero0", "embedding"), (1, "zero3", "bag"), (2, "zero0", "bag"), (2, "zero2", "embedding")),
        *((2, "zero2", "frozen embedding"), (2, "zero3", "frozen embedding")),
    ],
)
def test_max_norm_edits_weights_of_one_rank(ranks: Pools, size: int, stage: str, kind: str) -> None:
    """Each rank would edit the rows of its own tokens; frozen rows come to the same everywhere."""
    for text in ranks(size).run(bounded, kind, stage):
        if stage == "zero3":
            words = ("freed after use", "0.max_norm", "(max_norm=0.5)", "Remove max_norm")
        elif size == 2 and not kind.startswith("frozen"):
            words = ("copies would diverge", "0.max_norm", "2 data-parallel ranks", "Remove max_norm")
        else:
            assert text == ""
            continue
        assert all(word in text for word in words), text


def more_batches() -> str:
    """Rank 0 takes one step more than rank 1."""
    found = build_engine(Case(net, lambda model, turn: model), STAGES["zero2"])
    torch.distributed.barrier()
    found.mesh.shard.watch.timeout = 1.0
    try:
        for _ in range(3 if found.global_rank == 0 else 2):
            found.backward(found(torch.ones(2, 3)).mean())
            found.step()
    except MeshError as error:
        return str(error)
    return ""


def of_rank(what: str, stage: str) -> str:
    """The error of an engine that each rank makes in its own way."""
    first = torch.distributed.get_rank() == 0
    torch.manual_seed(0)
    model, config, given = net(), dict(CONFIG), {}
    if what == "shape" and first:
        model[2] = nn.Linear(4, 3)
    elif what == "layer" and first:
        model.append(nn.Linear(2, 2))
    elif what == "frozen":
        model[0].requires_grad_(first)
    elif what == "rate":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3 if first else 2e-3}}
    elif what == "accumulation":
        config |= {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1}
        config |= {"gradient_accumulation_steps": 1 if first else 2}
    elif what == "clip":
        config["gradient_clipping"] = 1.0 if first else 0.0
    elif what == "optimizer":
        given["optimizer"] = (torch.optim.SGD if first else torch.optim.Adam)(model.parameters(), lr=0.1)
    elif what == "function":
        given["optimizer"] = torch.optim.SGD if first else torch.optim.Adam
    elif what == "no optimizer":
        del config["optimizer"]
        given |= {"optimizer": torch.optim.SGD} if first else {}
    elif what == "groups":
        groups = [{"params": [param], "lr": 0.1 * place} for place, param in enumerate(model.parameters())]
        given["model_parameters"] = groups if first else groups[::-1]
    config["zero_optimization"] = STAGES["zero1" if what == "stage" and first else stage]
    try:
        zero_trial.initialize(model=model, config=config, **given)[0].destroy()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "2.weight (3, 4) torch.float32 on rank 0, 2.weight (2, 4) torch.float32 on rank 1"),
        ("layer", "3.weight (2, 2) torch.float32 on rank 0, nothing more on rank 1"),
        (
            "frozen",
            "0.weight (4, 3) torch.float32 on rank 0, 0.weight (4, 3) torch.float32 without gradients on rank 1",
        ),
        ("rate", 'optimizer ["AdamW", {"lr": 0.001}] on rank 0, optimizer ["AdamW", {"lr": 0.002}] on rank 1'),
        ("accumulation", "gradient_accumulation_steps 1 on rank 0, gradient_accumulation_steps 2 on rank 1"),
        ("clip", "gradient_clipping 1 on rank 0, gradient_clipping 0 on rank 1"),
        ("optimizer", "SGD on rank 0, Adam on rank 1"),
        ("function", "SGD on rank 0, Adam on rank 1"),
        ("no optimizer", "SGD on rank 0, no optimizer on rank 1"),
        ("groups", "group 0 (lr 0.0) on rank 0, group 0 (lr 0.3"),
        ("stage", "zero_optimization.stage 1 on rank 0, zero_optimization.stage 0 on rank 1"),
        ("nothing", ""),
    ],
)
def test_ranks_that_train_different_things_are_refused(ranks: Pools, what: str, words: str) -> None:
    for text in ranks(2).run(of_rank, what, "zero0"):
        assert words in text, text
        assert bool(text) is bool(words)


def cannot_start(what: str, taken: str) -> tuple[str, str]:
    """Start an engine that one rank cannot start; return this rank's error: its type and text."""
    model, config, given = net(), CONFIG | {"comm_timeout_seconds": 3}, {}
    where: dict[str, Any] | str = config
    if what == "stage":
        model = PipelineModule([LayerSpec(nn.Linear, 3, 4), LayerSpec(nn.Linear, 4, 2)], num_stages=2)
    if what == "monitor":  # of rank 0, in a folder that it cannot make
        config["csv_monitor"] = {"enabled": True, "output_path": taken, "job_name": "run"}
    elif torch.distributed.get_rank() == 1:
        if what == "config":
            config["train_batch_size"] = 3
        elif what == "file":
            where = "no_such_folder/ds_config.json"
        elif what == "key":
            config["train_bach_size"] = 4
        elif what == "level":
            config["log_level"] = "loud"
        elif what == "mesh":
            config["mesh"] = {"model": 3}
        elif what == "model":
            model = nn.Sequential(nn.DataParallel(model))
        else:
            given["model_parameters"] = list(net().parameters())
    try:
        zero_trial.initialize(model=model, config=where, **given)[0].destroy()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("config", 1, "train_batch_size"),
        ("file", 1, "no_such_folder/ds_config.json"),
        ("key", 1, "train_bach_size"),
        ("level", 1, "no such level"),
        ("mesh", 1, "2 ranks are not divisible by pipe 1 × model 3"),
        ("model", 1, "DataParallel"),
        ("groups", 1, "has parameters that do not belong to the model"),
        ("stage", 1, "has parameters that do not belong to the model"),
        ("monitor", 0, "could not be created"),
    ],
)
def test_a_rank_that_cannot_start_ends_the_start_of_all(
    ranks: Pools, tmp_path: Path, what: str, rank: int, words: str
) -> None:
    (tmp_path / "taken").touch()
    found = ranks(2).run(cannot_start, what, str(tmp_path / "taken"))
    (own, text), (other, told) = found[rank], found[1 - rank]
    assert own == "ConfigError" and words in text, text
    assert other == "TrialError" and f"another rank could not start: got rank {rank}: " in told and words in told, told


def test_a_group_without_a_rate_is_saved(tmp_path: Path) -> None:
    """As of Adafactor, which finds its own."""
    found = engine()
    found.optimizer.param_groups[0]["lr"] = None
    found.save_checkpoint(str(tmp_path))
    assert list(tmp_path.iterdir())


def saves_alone(stage: str, transport: str, folder: str) -> tuple[str, str]:
    """Rank 0 saves as scripts for DDP do; the others go on. The error, and the line of this file
    that saves."""
    waits.STUCK_SECONDS = 0.3
    config = {"comm_transport": transport, "comm_timeout_seconds": 3600}
    found = build_engine(Case(net, lambda model, turn: model, config=config), STAGES[stage])
    text, line = "", 0
    try:
        for _ in range(2):
            found.backward(found(torch.ones(2, 3)).mean())
            found.step()
            if found.global_rank == 0:
                line = inspect.currentframe().f_lineno + 1
                found.save_checkpoint(folder)
    except MeshError as error:
        text = str(error)
    return text, f"{__file__}:{line}"


def test_a_checkpoint_that_rank_0_saves_alone_ends_soon(tmp_path: Path) -> None:
    """Far before comm_timeout_seconds, an hour, though each waits in a collective of another
    axis."""
    pool = RankPool(2)
    try:
        (first, line), (second, _) = pool.run(saves_alone, "zero2", "auto", str(tmp_path))
    finally:
        pool.close()
    assert "save_checkpoint called by every rank" in first and "in different collectives" in first, first
    assert f"this rank at {line}" in first and "if rank == 0" in first
    assert "save_checkpoint called by every rank" in second, second


def test_a_rank_with_more_batches_than_another_gets_an_error() -> None:
    pool = RankPool(2)
    try:
        first, second = pool.run(more_batches)
    finally:
        pool.close()
    assert all(words in first for words in ("waited 1 s for rank 1", "step 2", "same number of batches"))
    assert second == ""
