"""What summary.json says of a run that ended well: the figures of the screen, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.metrics import without_counters
from zero_trial.trial.outcome import Outcome
from zero_trial.trial.trial import ZeroTrial


def build_summary(
    outcome: Outcome, trial: ZeroTrial, context: ZeroTrialContext, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Rank 0 only. The run's figures, then the validation metrics at the top level, then ``ZeroTrial.summary()``,
    then ``more``.

    Seconds and throughput are of the training part of this process alone: without start-up, validation and saving.
    """
    summary: dict[str, Any] = {
        "end": outcome.end.value,
        "step": outcome.step,
        "total_steps": outcome.total_steps,
        "train_seconds": outcome.train_seconds,
        "samples": outcome.samples,
        "samples_per_second": outcome.samples_per_second,
        "ranks": context.distributed.size,
        "zero_stage": zero_stage(context),
        **({"pipeline_stages": pipeline_stages(context)} if context.use_pipeline_parallel else {}),
        "seed": context.get_trial_seed(),
        "parameters": context.parameters,
        "global_batch_size": context.get_global_batch_size(),
        "micro_batch_size": context.get_train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": context.get_num_micro_batches_per_slot(),
        "checkpoint": outcome.checkpoint,
        "initial_validation": without_counters(outcome.initial_metrics),
        "final_validation": without_counters(outcome.final_metrics),
    }
    if trial.tokens_per_sample:
        summary["tokens_per_second"] = outcome.samples_per_second * trial.tokens_per_sample
    return {**summary, **without_counters(outcome.final_metrics), **trial.summary(), **more}


def pipeline_stages(context: ZeroTrialContext) -> int:
    """Of the first engine."""
    return int(context.engines[0].mpu.get_pipe_parallel_world_size())


def zero_stage(context: ZeroTrialContext) -> int | None:
    """The first engine's ZeRO stage, as far as it or its config says."""
    asked = getattr(context.engines[0], "zero_optimization_stage", None)
    if callable(asked):
        return int(asked())
    if not context.ds_configs:
        return None
    return int((context.ds_configs[0].get("zero_optimization") or {}).get("stage", 0))
