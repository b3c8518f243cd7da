"""Reports to draw: a run and a sweep with everything in them, made by simple formulas."""

from __future__ import annotations

import math
from dataclasses import replace

from zero_trial.report.report_data import (
    Axis,
    BestConfig,
    BracketHistory,
    CheckpointRow,
    Memory,
    MetricChange,
    RungDecision,
    RungOutcome,
    RunReport,
    Series,
    Setting,
    Status,
    SweepReport,
    Tone,
    TrialReport,
)

DONE = Status("completed", Tone.GOOD)
STOPPED = Status("stopped early", Tone.QUIET)


def run_report() -> RunReport:
    steps = tuple(float(step) for step in range(0, 700, 10))
    return RunReport(
        title="quickstart",
        status=DONE,
        subtitle="run 0001",
        changes=(
            MetricChange("validation_loss", 5.62, 1.94),
            MetricChange("val_bits_per_byte", 8.1, 2.8, (("unigram", 4.69), ("xz", 1.6))),
        ),
        facts=(
            ("trained for", "55 s"),
            ("steps", "700 of 700"),
            ("tokens per second", "13.1k"),
            ("parameters", "667.6k"),
            ("ranks", "2"),
        ),
        training=Series("loss", steps, tuple(1.8 + 4 * math.exp(-s / 90) + 0.05 * math.sin(s) for s in steps)),
        validation=(
            Series("validation_loss", (0.0, 350.0, 700.0), (5.62, 2.2, 1.94)),
            Series("val_bits_per_byte", (0.0, 350.0, 700.0), (8.1, 3.17, 2.8)),
        ),
        progress=(
            Series("learning rate", steps, tuple(4e-3 * (1 - s / 800) for s in steps)),
            Series("gradient norm", steps, tuple(0.5 + math.exp(-s / 50) for s in steps)),
            Series("tokens per second", steps, tuple(13000 + 500 * math.sin(s) for s in steps)),
        ),
        memory=Memory(
            {
                "parameters": 2_670_592,
                "gradients": 1_335_296,
                "optimizer": 2_670_592,
                "activations": 13_685_252,
                "temporary": 3_200_520,
            },
            23_562_252,
            23_000_000,
            processes=(397_824_000, 387_846_144),
            processes_kind="resident set",
        ),
        settings=(
            Setting("train_batch_size", 16, "hyperparameter global_batch_size", "", True),
            Setting("optimizer.params", {"lr": 0.004, "betas": [0.9, 0.95]}, "ds_config.json:5", "", True),
            Setting("zero_optimization.stage", 2, "ds_config.json:22", "", True),
            Setting("bf16.check_grad_overflow", True, "default", "false before DeepSpeed 0.19.8", False),
        ),
        batch=(Setting("train_micro_batch_size_per_gpu", 8, "derived: 16 // 2 ranks // 1", "", True),),
        checkpoints=(
            CheckpointRow(350, "step-000350", 8_090_653, False),
            CheckpointRow(700, "step-000700", 8_090_653, True),
        ),
        repeat="zero-trial run runs/0001/config.lock.yaml",
        lock="name: quickstart\n",
    )


def sweep_report(trials: int = 16, units: tuple[int, ...] = (15, 60)) -> SweepReport:
    """A search over three leaves, whose best fourth goes on from the first rung."""
    made = [_trial(number, units) for number in range(1, trials + 1)]
    order = sorted(made, key=lambda trial: trial.curve.values[0])
    on = {trial.id for trial in order[: max(1, trials // 4)]}
    ended = [trial if trial.id in on else _cut(trial) for trial in made]
    best = min(ended, key=lambda trial: trial.best or math.inf)
    return SweepReport(
        title="learning rates of a small GPT",
        status=DONE,
        searcher="adaptive_asha",
        metric="validation_loss",
        smaller_is_better=True,
        trials=(*ended, _pruned(trials + 1), _pruned(trials + 2)),
        throughput_unit="samples/s",
        axes=(
            Axis("ds_config.optimizer.params.lr", log=True),
            Axis("ds_config.zero_optimization.stage", choices=("0", "1", "2", "3")),
            Axis("ds_config.optimizer.params.weight_decay"),
        ),
        ladders=(BracketHistory(1, units, tuple(_decisions(ended, on, units))),),
        pruned=(("train_batch_size: 6 is not micro batch 4 x accumulation 1 x 2 ranks", 2),),
        best=BestConfig(best.id, best.best or 0.0, "best.yaml", "name: best\n", "zero-trial run best.yaml MODEL_DIR"),
        subtitle="experiment 3",
        facts=(("searcher", "adaptive_asha"), ("at a time", "2"), ("took", "4 min 2 s")),
    )


def _trial(number: int, units: tuple[int, ...]) -> TrialReport:
    rate = 10 ** (-4.5 + 3.5 * ((number * 7) % 17) / 17)
    floor = 2.0 + 0.6 * abs(math.log10(rate) + 2.4) ** 1.5
    curve = Series("validation_loss", tuple(map(float, units)), tuple(floor + 8 / (unit + 5) for unit in units))
    return TrialReport(
        id=str(number),
        status=DONE,
        point={
            "ds_config.optimizer.params.lr": rate,
            "ds_config.zero_optimization.stage": number % 4,
            "ds_config.optimizer.params.weight_decay": 0.2 * ((number * 5) % 11) / 11,
        },
        curve=curve,
        best=curve.values[-1],
        steps=units[-1],
        memory=Memory(planned=20_000_000 - 3_000_000 * (number % 4), measured=19_500_000 - 3_000_000 * (number % 4)),
        throughput=180.0 + number,
        seconds=12.0 + number,
    )


def _cut(trial: TrialReport) -> TrialReport:
    curve = Series(trial.curve.name, trial.curve.steps[:1], trial.curve.values[:1])
    return replace(trial, status=STOPPED, curve=curve, best=curve.values[0], steps=int(curve.steps[0]))


def _pruned(number: int) -> TrialReport:
    return TrialReport(str(number), Status("pruned", Tone.QUIET), {}, Series("validation_loss", (), ()), pruned=True)


def _decisions(trials: list[TrialReport], on: set[str], units: tuple[int, ...]) -> list[RungDecision]:
    found = []
    for place, trial in enumerate(trials, 1):
        verdict = RungOutcome.WENT_ON if trial.id in on else RungOutcome.STOPPED
        why = f"{place}th of the {place} measured here so far; the best {max(place // 4, 1)} may go on (1 in 4)."
        found.append(RungDecision(trial.id, verdict, 1, 0, units[0], trial.curve.values[0], why))
    for trial in trials:
        if trial.id in on:
            value = trial.curve.values[-1]
            found.append(
                RungDecision(trial.id, RungOutcome.FINISHED, 1, 1, units[-1], value, "1st of 1 that came this far.")
            )
    return found
