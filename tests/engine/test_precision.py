"""Dtypes from ds_config's values, the loss scale's state machine, casts of inputs, and the forward
under torch.autocast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, train_dense, train_ranks
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower
from tests.support.pipelines import batches, cross_entropy, layers, make_engine, micro_batch
from tests.support.pool import Pools, logged_lines
from zero_trial import zero
from zero_trial.errors import ConfigError, Diverged, TrialError
from zero_trial.pipeline import PipelineModule
from zero_trial.sharding.precision import LARGEST_SCALE, DynamicScale, StaticScale, cast_floats, dtype_policy

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "accumulation", "grad_accum", "comm", "expected"),
    [
        ("bf16", 1, None, None, (BF16, BF16, BF16)),
        ("bf16", 4, None, None, (BF16, FP32, FP32)),
        ("fp16", 4, None, None, (FP16, FP32, FP32)),
        ("fp32", 4, None, None, (FP32, FP32, FP32)),
        ("bf16", 4, "bf16", None, (BF16, BF16, BF16)),
        ("bf16", 1, "fp32", None, (BF16, FP32, FP32)),
        ("bf16", 4, None, "bf16", (BF16, FP32, BF16)),
        ("bf16", 1, None, "fp32", (BF16, BF16, FP32)),
    ],
)
def test_rule(
    precision: str, accumulation: int, grad_accum: str | None, comm: str | None, expected: tuple[torch.dtype, ...]
) -> None:
    policy = dtype_policy(
        precision, accumulation_steps=accumulation, grad_accum_dtype=grad_accum, communication_data_type=comm
    )
    assert (policy.param, policy.grad, policy.comm) == expected and policy.master == FP32


def test_unknown_dtype_names_its_key() -> None:
    with pytest.raises(ConfigError) as raised:
        dtype_policy("bf16", grad_accum_dtype="fp8")
    assert raised.value.where == "data_types.grad_accum_dtype"


def run(state: DynamicScale, pattern: str) -> list[tuple[float, int]]:
    """``x`` is an overflow, ``.`` a clean step; (scale, hysteresis left) after each."""
    trace = []
    for step in pattern:
        state = state.update(step == "x").state
        trace.append((state.scale, state.hysteresis_left))
    return trace


@pytest.mark.parametrize(
    ("settings_", "pattern", "expected"),
    [
        # window of 2: the clean step after two clean steps doubles; iteration 0 counts from
        # last_overflow = -1
        ({"window": 2, "hysteresis": 1}, ".....", [8, 8, 16, 16, 32]),
        ({"window": 2, "hysteresis": 1}, "x....x", [4, 4, 4, 8, 8, 4]),
        ({"window": 1, "hysteresis": 1}, "....", [8, 16, 32, 64]),
        ({"window": 100, "hysteresis": 3}, "xxxxx", [8, 8, 4, 2, 1]),
        # hysteresis is refilled by growth only ...
        ({"window": 2, "hysteresis": 2}, "x.x...x", [8, 8, 4, 4, 4, 8, 8]),
        ({"window": 100, "hysteresis": 2}, "x.x.x", [8, 8, 4, 4, 2]),
        # ... unless it is consecutive: then any clean step refills it
        ({"window": 100, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [8, 8, 8, 8, 8, 4]),
        ({"window": 100, "hysteresis": 1, "min_scale": 3.0}, "xx", [4, 3]),
    ],
)
def test_table(settings_: dict[str, object], pattern: str, expected: list[float]) -> None:
    state = DynamicScale(scale=8.0, **settings_)  # type: ignore[arg-type]
    assert [scale for scale, _ in run(state, pattern)] == expected


def test_growth_stops_below_infinity() -> None:
    state = DynamicScale(scale=LARGEST_SCALE, window=1, hysteresis=1, iteration=5)
    assert state.update(False).state.scale == LARGEST_SCALE


def test_settings_come_from_the_config_and_counters_from_the_checkpoint() -> None:
    saved = DynamicScale(scale=8.0, window=3, hysteresis=4).to_json()
    now = DynamicScale(scale=2.0, window=7, hysteresis=2).restored(saved)
    assert (now.scale, now.window, now.hysteresis_left) == (8.0, 7, 2)
    assert DynamicScale(scale=2.0).restored(StaticScale(64.0).to_json()).scale == 2.0
    assert StaticScale(128.0).restored(saved) == StaticScale(128.0)


def test_floats_are_cast_and_all_else_stays():
    tokens, mask, wide = torch.arange(3), torch.tensor([True]), torch.ones(2, dtype=torch.float64)
    args, kwargs = cast_floats(
        ((torch.ones(2), tokens, "text", None), {"mask": mask, "deep": [{"x": torch.ones(1)}], "wide": wide}),
        torch.bfloat16,
    )
    assert args[0].dtype == torch.bfloat16 and args[1] is tokens and args[2:] == ("text", None)
    assert kwargs["mask"] is mask
    assert kwargs["wide"] is wide, "64-bit inputs are meant"
    assert kwargs["deep"][0]["x"].dtype == torch.bfloat16


STEPS = 4


def masters(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    return {name: zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def train_mixed(
    dtype: torch.dtype,
    scale: float,
    accumulation: int,
    clip: float,
    wide: bool = False,
    kept: Sequence[str] = (),
    ranks: int = 2,
    case: Case | None = None,
) -> dict[str, torch.Tensor]:
    """fp32 masters of a plain loop: gradients of 16-bit parameters, added up in 16 bits for one
    micro-batch and in fp32 for several; those of the modules ``kept`` in fp32. Ranks add up in fp32
    and round once."""
    case = case if case is not None else Case(Tower, loss)
    torch.manual_seed(1)
    model = case.build()
    master = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.to(dtype)
    for module in map(model.get_submodule, kept):  # the model's inputs are cast first
        module.float().register_forward_pre_hook(lambda module, args: args[0].to(dtype).float())
        module.register_forward_hook(lambda module, args, out: out.to(dtype))
    for name, param in model.named_parameters():
        param.data.copy_(master[name])
    optimizer = case.dense_optimizer(master.values())
    usual = torch.float32 if accumulation > 1 or wide else dtype
    for step in range(STEPS):
        buffers = {name: torch.float32 if name.startswith(tuple(kept)) else usual for name in master}
        total = {name: torch.zeros_like(value) for name, value in master.items()}
        for rank in range(ranks):
            own = {name: torch.zeros_like(value, dtype=buffers[name]) for name, value in master.items()}
            for number in range(accumulation):
                (case.loss(model, Turn(step, number, rank)) * (scale / accumulation)).backward()
                for name, param in model.named_parameters():
                    own[name] += param.grad.to(buffers[name])
                    param.grad = None
            for name in total:
                total[name] += own[name]
        for name, value in master.items():
            value.grad = total[name].to(buffers[name]).float() / (ranks * scale)
        if clip:
            nn.utils.clip_grad_norm_(master.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(master[name])
    return master


PRECISIONS: dict[str, tuple[torch.dtype, float, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, 1.0, {"bf16": {"enabled": True}}),
    "fp16 static": (torch.float16, 128.0, {"fp16": {"enabled": True, "loss_scale": 128}}),
    "fp16 dynamic": (torch.float16, 256.0, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


def against_plain(precision: str, stage: str, accumulation: int, extra: dict[str, Any]) -> tuple[float, bool]:
    """(largest difference of masters, every parameter is its rounded master)."""
    dtype, scale, config = PRECISIONS[precision]
    engine = build_engine(Case(Tower, loss, accumulation=accumulation, clip=0.3, config=config | extra), STAGES[stage])
    for step in range(STEPS):
        for number in range(accumulation):
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            engine.step()
    assert engine.skipped_steps == 0
    kept = tuple(extra.get("data_types", {}).get("keep_in_fp32_modules", ()))
    reference = train_mixed(dtype, scale, accumulation, 0.3, extra == WIDE, kept, engine.dp_world_size)
    ours, state = masters(engine), engine.module_state_dict()
    dtypes = {name: FP32 if kept and name.startswith(kept) else dtype for name in ours}
    rounded = all(
        state[name].dtype == dtypes[name] and torch.equal(state[name], value.to(dtypes[name]))
        for name, value in ours.items()
    )
    return max((ours[name] - value).abs().max().item() for name, value in reference.items()), rounded


WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}
KEPT = {"data_types": {"keep_in_fp32_modules": ["first", "blocks.1"]}}


@pytest.mark.parametrize(
    ("precision", "stage", "accumulation", "extra"),
    [
        *(("bf16", stage, 1 + row % 2, {}) for row, stage in enumerate(STAGES)),
        *(("fp16 dynamic", stage, 2 - row % 2, {}) for row, stage in enumerate(STAGES)),
        ("fp16 static", "zero2", 1, {}),
        ("bf16", "zero1", 1, WIDE),
        ("bf16", "zero3", 1, WIDE),
        *(("bf16", stage, 1 + row % 2, KEPT) for row, stage in enumerate(STAGES)),
        *(("fp16 dynamic", stage, 2 - row % 2, KEPT) for row, stage in enumerate(STAGES)),
    ],
)
def test_masters_follow_a_plain_mixed_precision_loop(
    ranks: Pools, precision: str, stage: str, accumulation: int, extra: dict[str, Any]
) -> None:
    """Tolerance 2e-6: the sums are made in the same dtypes and order; only the norm's order of
    summation differs."""
    for gap, rounded in ranks(2).run(against_plain, precision, stage, accumulation, extra):
        assert gap <= TOLERANCE and rounded


@pytest.mark.parametrize("size", [1, 3, 4])
def test_modules_in_fp32_follow_it_on_any_number_of_ranks(ranks: Pools, size: int) -> None:
    for row, stage in enumerate(STAGES):
        for gap, rounded in ranks(size).run(against_plain, ("bf16", "fp16 dynamic")[row % 2], stage, 1, KEPT):
            assert gap <= TOLERANCE and rounded


def pipeline_against_plain(stage: str, schedule: str, count: int) -> tuple[float, set[torch.dtype]]:
    """The same of a pipeline, over this rank's layers; and the dtypes of what stays fp32. With this
    optimizer two lines have the bits of the plain loop: all factors are powers of two. AdamW may
    round a master otherwise, and its parameter's next bf16 value is then another one."""
    named, kept = ["norm", "3", "8"], [*(f"{layer}.norm" for layer in (1, 2, 4, 5, 6)), "3", "8"]
    extra = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": named}}
    extra |= {"optimizer": {"type": "SGD", "params": {"lr": 0.125}}, "pipeline": {"schedule": schedule}}
    given: Any = layers(tied=False)
    engine = make_engine(given, 2, STAGES[stage], count, **extra)
    line, lines = engine.mpu.get_data_parallel_rank(), engine.dp_world_size
    data = batches(line, count, STEPS) if engine.is_first_stage() else None
    for _ in range(STEPS):
        engine.train_batch(data)

    def loss(model: Any, turn: Turn) -> torch.Tensor:
        inputs, labels = micro_batch(turn.step, turn.turn, turn.rank)
        return cross_entropy(model(inputs), labels)

    build = partial(PipelineModule, given, num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    case = Case(build, loss, dense_optimizer=partial(torch.optim.SGD, lr=0.125))
    reference = train_mixed(BF16, 1.0, count, 0.0, kept=kept, ranks=lines, case=case)
    inside = {value.dtype for name, value in engine.module_state_dict().items() if name.startswith(tuple(kept))}
    return max((value - reference[name]).abs().max().item() for name, value in masters(engine).items()), inside


@pytest.mark.parametrize(
    ("stage", "schedule", "count"),
    [
        ("zero0", "1f1b", 2),
        ("zero1", "zb_h1", 4),
        ("zero2", "interleaved", 2),
        ("zero3-free", "gpipe", 1),
        ("zero3", "zb_v", 4),
    ],
)
def test_a_pipeline_with_modules_in_fp32_follows_it(ranks: Pools, stage: str, schedule: str, count: int) -> None:
    for gap, inside in ranks(4).run(pipeline_against_plain, stage, schedule, count):
        assert gap == 0 and inside == {FP32}


def resumed(folder: str, saved: str, loaded: str) -> list[str]:
    """Masters and dtypes after four steps, two of them in an engine at another stage."""
    config = PRECISIONS["bf16"][2] | KEPT
    case = Case(Tower, loss, clip=0.3, config=config)
    engine = build_engine(case, STAGES[saved])
    for step in range(4):
        if step == 2 and saved != loaded:
            engine.save_checkpoint(folder)
            engine = build_engine(case, STAGES[loaded])
            engine.load_checkpoint(folder)
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
    dtypes = {name: value.dtype for name, value in engine.module_state_dict().items()}
    return [f"{name} {dtypes[name]} {value.flatten().tolist()}" for name, value in masters(engine).items()]


def test_a_checkpoint_with_modules_in_fp32_is_read_at_any_stage(ranks: Pools, tmp_path: Path) -> None:
    unbroken = ranks(2).run(resumed, str(tmp_path), "zero1", "zero1")[0]
    assert sum("float32" in line for line in unbroken) == 4
    for loaded in ("zero0", "zero2", "zero3-free"):
        assert ranks(2).run(resumed, str(tmp_path), "zero1", loaded) == [unbroken] * 2


def shown(stage: str) -> list[bool]:
    """Whether parameters have the bits of their masters in their own dtype: averaged and set."""
    config = PRECISIONS["bf16"][2] | KEPT | {"ema": {"decay": 0.5}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES[stage])
    for step in range(2):
        engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
        engine.step()
    found = []

    def compare(expected: dict[str, torch.Tensor]) -> None:
        for name, value in engine.named_full_parameters():
            dtype = FP32 if name.startswith(("first", "blocks.1")) else BF16
            found.append(value.dtype == dtype and torch.equal(value, expected[name].to(dtype)))

    with engine.ema_weights():
        compare(masters(engine))
    given = {name: value + torch.pi for name, value in masters(engine).items()}
    for param, value in zip(engine.module.parameters(), given.values(), strict=True):
        zero.safe_set_full_fp32_param(param, value)
    compare(given)
    return found + [torch.equal(value, given[name]) for name, value in masters(engine).items()]


@pytest.mark.parametrize("stage", ["zero1", "zero3-free"])
def test_values_of_modules_in_fp32_are_shown_averaged_and_set_unrounded(ranks: Pools, stage: str) -> None:
    for found in ranks(2).run(shown, stage):
        assert len(found) == 30 and all(found)


def inject(engine: zero_trial.Engine, name: str, rank: int, when: dict[str, Any], value: float) -> None:
    """From now on rank ``rank``'s gradient of ``name`` gets one bad element while
    ``when["now"]``."""
    if engine.global_rank != rank:
        return

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        if when["now"]:
            grad = grad.clone()
            grad.view(-1)[-1] = value
        return grad

    dict(engine.module.named_parameters())[name].register_hook(spoil)


def overflows(
    stage: str, precision: dict[str, Any], name: str, rank: int, bad: tuple[int, ...], accumulation: int
) -> dict[str, Any]:
    """Train eight steps; the gradient of ``name`` is bad on ``rank`` in the first micro-batch of
    the steps ``bad``."""
    schedule = {"type": "ExponentialLR", "params": {"gamma": 0.9}}
    engine = build_engine(
        Case(Tower, loss, accumulation=accumulation, config=precision | {"scheduler": schedule}), STAGES[stage]
    )
    lines, when = logged_lines(), {"now": False}
    inject(engine, name, rank, when, float("inf"))
    seen: dict[str, Any] = {"applied": [], "scale": [], "lr": [], "changed": [], "culprit": None}
    for step in range(8):
        before = masters(engine)
        for number in range(accumulation):
            when["now"] = step in bad and number == 0
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            engine.step()
        after = masters(engine)
        seen["applied"].append(engine.was_step_applied())
        seen["scale"].append(engine.loss_scale)
        seen["lr"].append(engine.get_lr()[0])
        seen["changed"].append(any(not torch.equal(before[key], after[key]) for key in before))
        if not engine.was_step_applied():
            assert engine.last_nonfinite is not None
            seen["culprit"] = (engine.last_nonfinite.step, engine.last_nonfinite.rank, engine.last_nonfinite.parameter)
    finite = all(torch.isfinite(value).all() for value in masters(engine).values())
    warnings = [line for line in lines if "not finite" in line]
    return seen | {
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "finite": finite,
        "warnings": warnings,
    }


FP16_MASTERS = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}}


@pytest.mark.parametrize(("stage", "accumulation"), [(stage, 1 + row % 2) for row, stage in enumerate(STAGES)])
def test_an_overflow_on_one_rank_acts_on_all(ranks: Pools, stage: str, accumulation: int) -> None:
    """Steps 2 and 3 overflow: the first eats the hysteresis, the second halves the scale; after two
    clean steps it doubles."""
    name = "blocks.1.weight"
    answers = ranks(2).run(overflows, stage, FP16_MASTERS, name, 1, (2, 3), accumulation)
    for seen in answers:
        assert seen["applied"] == [True, True, False, False, True, True, True, True]
        assert seen["changed"] == seen["applied"]
        assert seen["lr"][0] > seen["lr"][1] == seen["lr"][2] == seen["lr"][3] > seen["lr"][4]
        assert seen["scale"] == [256.0, 256.0, 256.0, 128.0, 128.0, 128.0, 256.0, 256.0]
        assert (seen["skipped"], seen["steps"], seen["finite"]) == (2, 8, True) and seen["culprit"] == (3, 1, name)
    first, second = (seen["warnings"] for seen in answers)
    assert not second, "rank 0 alone speaks"
    assert [line.split(";")[0] for line in first] == [
        f"step {step}: the gradient of {name} is not finite on rank 1" for step in (2, 3)
    ]
    assert "loss scale 256 -> 128" in first[1] and "loss scale" not in first[0]


@pytest.mark.parametrize(("stage", "rank", "name"), [("zero1", 2, "blocks.1.bias"), ("zero3-free", 3, "first.weight")])
def test_the_culprit_is_named_in_hybrid_sharding(ranks: Pools, stage: str, name: str, rank: int) -> None:
    mesh: dict[str, Any] = {"mesh": {"shard": 2, "replica": 2}}
    for seen in ranks(4).run(overflows, stage, mesh, name, rank, (1,), 2):
        assert seen["culprit"] == (1, rank, name) and seen["skipped"] == 1


def at_minimum(stage: str) -> tuple[str, int, bool]:
    config = {"fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES[stage])
    inject(engine, "last.bias", 1, {"now": True}, float("nan"))
    before = masters(engine)
    try:
        for step in range(3):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            engine.step()
    except Diverged as error:
        return str(error), error.exit_code, all(torch.equal(before[k], v) for k, v in masters(engine).items())
    return "", 0, False


def test_at_the_smallest_scale_all_ranks_end_with_one_message(ranks: Pools) -> None:
    first, second = ranks(2).run(at_minimum, "zero3")
    assert first == second
    message, code, untouched = first
    assert all(word in message for word in ("already at its minimum", "last.bias", "rank 1"))
    assert code == 4 and untouched


def unchecked(stage: str) -> tuple[bool, bool]:
    config = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES[stage])
    inject(engine, "last.bias", 0, {"now": True}, float("nan"))
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    return engine.was_step_applied(), bool(torch.isfinite(masters(engine)["last.bias"]).all())


def test_without_the_check_the_step_is_taken(ranks: Pools) -> None:
    assert ranks(2).run(unchecked, "zero2") == [(True, False)] * 2


def wide() -> nn.Module:
    """float64, with buffers that no precision is for."""
    model = Tower().double()
    model.register_buffer("count", torch.tensor(2**40 + 1))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("phase", torch.tensor([1j, 2 - 1j]))
    return model


def loss_dtypes(model: Any, turn: Turn) -> torch.Tensor:
    return (model(turn.normal(4, 5).double()) - 1).square().mean()


def in_double(stage: str, accumulation: int, clip: float, folder: str) -> tuple[float, list[str], bool]:
    """(largest difference to plain torch's float64, dtypes of all that is kept, a checkpoint brings
    back every bit)."""
    case = Case(wide, loss_dtypes, accumulation=accumulation, clip=clip)
    engine = build_engine(case, STAGES[stage])
    *_, (dense, _) = zip(train_dense(case, 2), train_ranks(case, engine), strict=True)
    mine = {name: zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    gap = max((mine[name] - value).abs().max().item() for name, value in dense.named_parameters())
    state = engine.module_state_dict()
    moments = [
        value
        for row in engine.optimizer.state.values()
        for value in row.values()
        if torch.is_tensor(value) and value.dim()
    ]
    dtypes = sorted({str(value.dtype) for value in (*state.values(), *moments)})
    engine.save_checkpoint(folder, tag=stage)
    other = build_engine(case, STAGES[stage])
    other.load_checkpoint(folder, tag=stage)
    again = other.module_state_dict()
    same = [torch.equal(again[name], value) and again[name].dtype == value.dtype for name, value in state.items()]
    return gap, dtypes, all(same)


@pytest.mark.parametrize(
    ("stage", "accumulation", "clip"), [(stage, 1 + row % 2, 0.1 * (row % 2)) for row, stage in enumerate(STAGES)]
)
def test_a_float64_model_trains_in_float64(
    ranks: Pools, tmp_path: Path, stage: str, accumulation: int, clip: float
) -> None:
    """Tolerance 1e-12, where fp32 anywhere on the way would leave 1e-8: gradients, messages, norm,
    moments and masters are float64.

    Plain torch adds up in another order, which changes a gradient by about 1e-16, and Adam with its
    eps of 1e-3 a weight by no more.
    """
    for gap, dtypes, same in ranks(2).run(in_double, stage, accumulation, clip, str(tmp_path)):
        assert gap <= 1e-12 and dtypes == ["torch.bool", "torch.complex64", "torch.float64", "torch.int64"] and same


def test_a_weight_that_stays_fp32_is_named_where_it_meets_another_dtype() -> None:
    """Outside of its module's forward nothing casts."""

    class Functional(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.first.weight)

    engine = build_engine(Case(Functional, loss, config=PRECISIONS["bf16"][2] | KEPT), STAGES["zero1"])
    with pytest.raises(TrialError, match=r"stay fp32 \(first.weight, .*\): two dtypes meet .* only casts"):
        engine(torch.ones(4, 5))
