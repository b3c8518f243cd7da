"""What a training run will need in memory, known before it starts: rehearsed on one imagined rank."""

from zero_trial.planning.changes import comparison_table, does_not_fit, smallest_change
from zero_trial.planning.pipeline_plan import PipelinePlan, PipelinePlanner
from zero_trial.planning.plan import Figures, MemoryPlan
from zero_trial.planning.planner import Choice, Planner, memory_plan
from zero_trial.planning.subject import ModelSubject

__all__ = [
    "Choice",
    "Figures",
    "MemoryPlan",
    "ModelSubject",
    "PipelinePlan",
    "PipelinePlanner",
    "Planner",
    "comparison_table",
    "does_not_fit",
    "memory_plan",
    "smallest_change",
]
