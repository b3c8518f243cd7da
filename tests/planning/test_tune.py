"""Ways to train: which there are, which are worth a trial, and what becomes of one: changes of an
experiment, a plan, and a short run."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.project import MODEL, project
from zero_trial.ds_config.keys_running import AutotuningSection
from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.launch.first_cause import Cause
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.launch.screen import Screen
from zero_trial.launch.supervisor import LaunchResult
from zero_trial.planning import tune
from zero_trial.planning.lone_task import PlannedMachine
from zero_trial.planning.tune import (
    ACCUMULATION,
    MICRO,
    STAGE,
    Margin,
    TrainingWay,
    TuneFacts,
    Weighed,
    changes_of_trial,
    facts_of,
    kept_keys,
    of_other_samples,
    own_way,
    refuse_autotuning,
    run_trial,
    search_budget,
    select,
    ways_to_train,
    weigh_way,
)

NOW = {STAGE: 2, MICRO: 4, ACCUMULATION: 2, "pipeline.schedule": "1f1b", "pipeline.chunks_per_rank": 1}
FACTS = TuneFacts(samples=8, current=NOW)
NO_MARGIN = Margin(0.0, 0)


def test_every_way_has_the_same_global_batch_and_is_there_once() -> None:
    ways = ways_to_train(FACTS)
    assert {way.mapping[MICRO] * way.mapping[ACCUMULATION] for way in ways} == {8}
    assert len(ways) == len({way.values for way in ways}) == len(set(ways))
    assert {(way.mapping[STAGE], way.micro_batch) for way in ways} == {(s, m) for s in range(4) for m in (8, 4, 2, 1)}
    assert own_way(FACTS) in ways


def test_what_is_kept_and_limited() -> None:
    every = {0, 1, 2, 3}
    for changed, stages, sizes in (
        ({"keep": (STAGE,)}, {2}, {8, 4, 2, 1}),
        ({"keep": (MICRO,)}, every, {4}),
        ({"smallest": 2, "largest": 4}, every, {4, 2}),
        ({"samples": 6, "current": {**NOW, MICRO: 3}}, every, {6, 3, 2, 1}),
        ({"pipe": 4}, every, {2, 1}),  # fewer micro-batches than stages leave ranks idle
    ):
        ways = ways_to_train(replace(FACTS, **changed))
        assert {way.mapping[STAGE] for way in ways} == stages and {way.micro_batch for way in ways} == sizes


def test_savers_come_from_the_fastest_to_the_smallest() -> None:
    def ladder(facts: TuneFacts, stage: int) -> list[dict[str, Any]]:
        found = [way.mapping for way in ways_to_train(facts) if (way.mapping[STAGE], way.micro_batch) == (stage, 4)]
        base = (STAGE, MICRO, ACCUMULATION)
        return [{key.rpartition(".")[2]: value for key, value in way.items() if key not in base} for way in found]

    assert ladder(FACTS, 0) == [{}]
    assert ladder(FACTS, 2) == [{}, {"reduce_every": "micro"}]
    least = {"reshard_after": "forward", "reduce_every": "micro"}
    assert ladder(FACTS, 3)[:3] == [{"reshard_after": "step", "reduce_every": "boundary"}, {}, least]
    assert len(ladder(replace(FACTS, accelerator=True), 0)) == 3  # optimizer state away, then parameters, too
    disks = ("/disk", "/other")
    assert ladder(replace(FACTS, nvme_path=disks), 0)[1] == {"device": "nvme", "nvme_path": disks}
    kept = replace(FACTS, keep=("zero_optimization.reduce_every",))
    assert ladder(kept, 2) == [{}]


REDUCE = "zero_optimization.reduce_every"
AWAY = {f"zero_optimization.offload_{name}.device": "cpu" for name in ("optimizer", "param")}
INTERVAL = "pipeline.activation_checkpoint_interval"


@pytest.mark.parametrize(
    ("now", "changed", "off"),
    [
        (AWAY, {"accelerator": True}, dict.fromkeys(AWAY, "none")),
        ({REDUCE: "micro"}, {}, {REDUCE: "auto"}),
        ({INTERVAL: 2}, {"pipe": 2}, {INTERVAL: 0}),
        (AWAY, {"accelerator": True, "keep": ("zero_optimization.offload_optimizer",)}, {[*AWAY][1]: "none"}),
        ({}, {"accelerator": True}, {}),
    ],
)
def test_savers_of_the_ds_config_are_off_where_they_are_not_needed(
    now: dict[str, Any], changed: dict[str, Any], off: dict[str, Any]
) -> None:
    facts = replace(FACTS, current={**NOW, **now}, **changed)
    ways = ways_to_train(facts)
    first = next(way for way in ways if way.mapping[STAGE] == 0)
    assert {key: first.mapping.get(key) for key in off} == off
    assert set(first.mapping) & set(now) == set(off)
    own = own_way(facts)
    assert {key: own.mapping[key] for key in off} == {key: now[key] for key in off}
    assert all(way == own for way in ways if way.mapping == own.mapping)  # never a second time


def test_state_that_is_on_a_disk_now_can_be_there_or_come_back() -> None:
    section = "zero_optimization.offload_optimizer"
    now = {f"{section}.device": "nvme", f"{section}.nvme_path": ("/d",)}
    for accelerator, places in (False, ["none", "nvme", "nvme"]), (True, ["none", "cpu", "cpu", "nvme", "nvme"]):
        facts = replace(FACTS, current={**NOW, **now, STAGE: 0}, nvme_path=("/d",), accelerator=accelerator)
        ladder = [way.mapping for way in ways_to_train(facts) if (way.mapping[STAGE], way.micro_batch) == (0, 4)]
        assert [way[f"{section}.device"] for way in ladder] == places
    assert own_way(replace(facts, accelerator=False)) in ways_to_train(replace(facts, accelerator=False))


def test_what_can_be_kept() -> None:
    offload = "zero_optimization.offload_param"
    for word, key in ((STAGE, STAGE), (f"hyperparameters.ds_config.{STAGE}", STAGE), (offload, offload)):
        assert kept_keys([word]) == (key,)
    for word in ("zero_optimisation.stage", "gradient_clipping", f"{offload}.pin_memory"):
        with pytest.raises(ConfigError, match="--keep"):
            kept_keys([word])
    for keep, gone in (
        ("zero_optimization.offload_optimizer", ("optimizer",)),
        ("zero_optimization.offload_optimizer.device", ("optimizer",)),
        ("zero_optimization", ("optimizer", "param")),
    ):
        keys = {key for way in ways_to_train(replace(FACTS, nvme_path=("/d",), keep=(keep,))) for key in way.mapping}
        for name in ("optimizer", "param"):
            assert any(key.startswith(f"zero_optimization.offload_{name}.") for key in keys) is (name not in gone)
        stages = {way.mapping[STAGE] for way in ways_to_train(replace(FACTS, keep=(keep,)))}
        assert stages == ({2} if keep == "zero_optimization" else {0, 1, 2, 3})


def test_a_pipeline_has_schedules_and_recomputation() -> None:
    ways = [way.mapping for way in ways_to_train(replace(FACTS, pipe=2))]
    assert {way["pipeline.schedule"] for way in ways} == {"1f1b", "interleaved", "zb_h1"}
    assert {way.get("pipeline.activation_checkpoint_interval") for way in ways} == {None, 1}
    held = ways_to_train(replace(FACTS, pipe=2, keep=("pipeline.schedule", "pipeline.chunks_per_rank")))
    assert len(held) * 3 == len(ways)


OWN = own_way(FACTS)


def weigh(way: TrainingWay) -> Weighed:
    """Bytes: 100 per sample of a micro-batch, half with a saver."""
    return Weighed(way.micro_batch * 100 // (2 if REDUCE in way.mapping else 1), 1 / way.micro_batch)


@pytest.mark.parametrize(
    ("limit", "sizes", "chosen"),
    [
        (None, 2, [(4, False), (8, False)]),  # the own one first, then the best estimate
        (10_000, 3, [(4, False), (8, False), (2, False)]),
        (400, 3, [(4, False), (2, False)]),
        (300, 2, [(4, True), (2, False)]),  # the larger only with a saver
        (100, 9, [(2, True)]),
        (10, 9, []),
    ],
)
def test_the_first_way_of_a_ladder_that_fits(limit: int | None, sizes: int, chosen: list[tuple[int, bool]]) -> None:
    ways = [way for way in ways_to_train(replace(FACTS, smallest=2)) if way.mapping[STAGE] == 2]
    found = select(ways, weigh, NO_MARGIN, limit, sizes=sizes, own=OWN)
    assert [(way.micro_batch, REDUCE in way.mapping) for way in found.ways] == chosen
    assert len(found.ways) + len(found.pruned) == len(ways)


def test_margins_refusals_and_the_own_way() -> None:
    margin = Margin(0.1, 50)
    ways = ways_to_train(replace(FACTS, keep=(STAGE, MICRO)))[:1]
    assert select(ways, lambda way: Weighed(1000), margin, 1150, sizes=1, own=OWN).ways == tuple(ways)
    refused = select(ways, lambda way: Weighed(1000), margin, 1149, sizes=1, own=OWN)
    assert not refused.ways and "1000 B" in refused.pruned[0][1]
    own = own_way(replace(FACTS, current={**NOW, MICRO: 1, ACCUMULATION: 8}))

    def large_is_refused(way: TrainingWay) -> Weighed:
        return Weighed(refusal="no") if way.micro_batch == 8 else Weighed(1)

    ways = ways_to_train(replace(FACTS, keep=(STAGE,)))
    found = select(ways, large_is_refused, NO_MARGIN, 9, sizes=1, own=own)
    assert {why for way, why in found.pruned if way.micro_batch == 8} == {"no"}
    assert [way.micro_batch for way in found.ways] == [1, 4], "the own way stays"
    # a loader that ignores the micro-batch leaves the own size
    found = select(ways_to_train(FACTS), lambda way: Weighed(1, samples=4), NO_MARGIN, None, sizes=3, own=OWN)
    assert {way.micro_batch for way in found.ways} == {4}
    assert any("context.get_train_micro_batch_size_per_gpu()" in why for _, why in found.pruned)


def test_a_way_trains_on_as_many_samples_as_the_own_one() -> None:
    for micro, given, own, refused in (
        (8, 8, 4, False),
        (8, 4, 4, True),  # half of the samples: faster, and another training
        (2, 4, 4, True),
        (4, 3, 3, False),  # the ds_config's own size, whatever the loader gives there
        (8, None, 4, False),
        (8, 8, None, False),  # the own way has no plan
        (8, 4, None, True),
        (8, 6, 3, False),  # it follows the micro-batch
    ):
        way = next(way for way in ways_to_train(FACTS) if way.micro_batch == micro)
        found = of_other_samples(way, Weighed(1, samples=given), OWN, Weighed(1, samples=own))
        assert bool(found.refusal) is refused, (micro, given, own)


# --- one way: planned, and measured ---


def way(stage: int, micro: int, accumulation: int) -> TrainingWay:
    return TrainingWay(((STAGE, stage), (MICRO, micro), (ACCUMULATION, accumulation)), ((STAGE, stage),))


CPU = PlannedMachine("cpu", None, one_host=True)


def test_the_values_of_a_way_reach_the_ds_config(tmp_path: Path) -> None:
    """A trial writes to no monitor; savers that are switched on are among the facts."""
    monitors = {name: {"enabled": True} for name in ("wandb", "comet", "tensorboard", "csv_monitor")}
    zero = {"stage": 2, "reduce_every": "micro", "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    made = project(tmp_path, ds_config={"train_batch_size": 8, "zero_optimization": zero, **monitors})
    request = RunRequest(made.experiment, made.folder)
    config = check_run(replace(request, changes=changes_of_trial(way(3, 2, 2), 3)), os.environ).ds_config
    assert config is not None
    assert (config.zero_optimization.stage, config.train_micro_batch_size_per_gpu) == (3, 2)
    assert not any(getattr(config, name).enabled for name in monitors)
    facts = facts_of(check_run(request, os.environ), keep=(), accelerator=False)
    assert (facts.samples, facts.pipe, facts.current[STAGE], facts.current[MICRO]) == (4, 1, 2, 4)
    own = own_way(facts)
    assert own.mapping["zero_optimization.offload_optimizer.device"] == "nvme"
    assert own.mapping["zero_optimization.reduce_every"] == "micro"


def test_a_plan_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    made = project(tmp_path)
    request = RunRequest(made.experiment, made.folder)
    small, large = weigh_way(request, way(0, 1, 4), CPU, os.environ), weigh_way(request, way(0, 4, 1), CPU, os.environ)
    assert 0 < small.bytes < large.bytes
    assert small.seconds > large.seconds  # more micro-batches
    refused = weigh_way(replace(request, changes={("hyperparameters", "width"): 5}), way(0, 1, 4), CPU, os.environ)
    assert refused.refusal
    assert not weigh_way(request, way(0, 3, 1), CPU, os.environ).bytes  # 3 x 1 x 2 ranks is not the global batch


FIXED = "self.context.get_train_micro_batch_size_per_gpu())"
TORCH = "torch.utils.data.DataLoader([torch.ones(4)] * 6, "


@pytest.mark.parametrize(
    ("model", "samples", "refused"),
    [
        (MODEL, 4, False),
        (MODEL.replace(FIXED, "2)"), 2, False),  # select compares it with the own way's
        (MODEL.replace("DataLoader([torch.ones(4)] * 40, ", TORCH).replace(FIXED, "8, drop_last=True)"), None, True),
        (MODEL.replace(FIXED, FIXED[:-1] + ", collate_fn=lambda samples: samples[9])"), None, True),
    ],
    ids=["follows", "of its own size", "has too few samples", "cannot make this batch"],
)
def test_what_the_loader_gives_is_known(model: str, samples: int | None, refused: bool, tmp_path: Path) -> None:
    """What yields nothing is a refusal of this way and does not end the tune."""
    made = project(tmp_path, model=model)
    found = weigh_way(RunRequest(made.experiment, made.folder), way(0, 4, 1), CPU, os.environ)
    assert (found.samples, bool(found.refusal)) == (samples, refused)


@pytest.mark.parametrize(
    ("code", "cause", "interrupted"),
    [
        (ExitStatus.INFRASTRUCTURE, "killed by SIGKILL, perhaps by the kernel's out-of-memory killer", False),
        (130, "stopped by SIGINT", True),  # before the ranks were there
        (ExitStatus.PREEMPTED, "stopped at step 1 of 60 and saved", True),
    ],
)
def test_how_a_trial_ends_early(
    code: int, cause: str, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "run_experiment", lambda *_: (LaunchResult(code, Cause(None, cause, code)), tmp_path))
    request, screen = RunRequest(made.experiment, made.folder), Screen(io.StringIO(), quiet=True)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            run_trial(request, way(0, 4, 1), 3, screen, os.environ)
    else:
        assert cause in run_trial(request, way(0, 4, 1), 3, screen, os.environ).why
    assert bool(list((tmp_path / "tunes").iterdir())) is not interrupted


def test_the_autotuning_section_sets_the_defaults() -> None:
    for section, asked, expected in (
        ({}, {}, (6, 18)),
        ({}, {"trials": 9, "steps": 8}, (9, 10)),
        ({"tuner_num_trials": 5}, {}, (5, 18)),
        ({"start_profile_step": 1, "end_profile_step": 4}, {}, (6, 5)),
        ({"fast": False}, {}, (24, 18)),
        ({"tuner_type": "gridsearch"}, {}, (24, 18)),
    ):
        assert search_budget(AutotuningSection(**section), 24, **asked) == expected
    for asked in ({"trials": 0}, {"steps": -3}):
        with pytest.raises(ConfigError, match=f"--{next(iter(asked))}"):
            search_budget(AutotuningSection(), 24, **asked)
    refuse_autotuning(AutotuningSection(), 32)
    for key, section in (
        ("tuner_type", {"tuner_type": "random"}),
        ("max_train_batch_size", {"max_train_batch_size": 16}),
        ("min_train_batch_size", {"min_train_batch_size": 64}),
        ("end_profile_step", {"start_profile_step": 9, "end_profile_step": 8}),
    ):
        with pytest.raises(ConfigError, match=f"autotuning.{key}"):
            refuse_autotuning(AutotuningSection(**section), 32)
