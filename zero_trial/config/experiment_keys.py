"""Every key of an experiment's YAML (Determined 0.38.1), with the kind of those that are read here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zero_trial.config.kinds import Bool, Int, Kind, Opaque, Section, Text

_ANY = Opaque()

TOP: Mapping[str, Kind] = MappingProxyType(
    {
        "name": Text(),
        "data": Section(),
        "scheduling_unit": Int(1, unit="batches"),
        "max_restarts": Int(0),
        "checkpoint_policy": Text(("best", "all", "none")),
        "records_per_epoch": Int(0),
        "perform_initial_validation": Bool(),
        "debug": Bool(),
        "description": _ANY,
        "entrypoint": _ANY,
        "hyperparameters": _ANY,
        "min_checkpoint_period": _ANY,
        "min_validation_period": _ANY,
    }
)

# Sections whose keys are checked by name.
SECTIONS: Mapping[str, Mapping[str, Kind]] = MappingProxyType(
    {
        "resources": {
            "slots_per_trial": Int(0),
            **dict.fromkeys(
                (
                    *(
                        "agent_label",
                        "devices",
                        "is_single_node",
                        "manifests",
                        "max_slots",
                        "native_parallel",
                        "priority",
                    ),
                    *("resource_manager", "resource_pool", "shm_size", "slots", "weight"),
                ),
                _ANY,
            ),
        },
        "reproducibility": {"experiment_seed": Int(0, 2**31 - 1)},
        "searcher": {
            "name": Text(
                (
                    *("single", "random", "grid", "adaptive_asha", "adaptive", "adaptive_simple", "async_halving"),
                    *("sync_halving", "custom"),
                )
            ),
            "metric": Text(),
            "smaller_is_better": Bool(),
            **dict.fromkeys(
                (
                    *(
                        "bracket_rungs",
                        "budget",
                        "divisor",
                        "max_concurrent_trials",
                        "max_length",
                        "max_rungs",
                        "max_time",
                    ),
                    *("max_trials", "mode", "num_rungs", "source_checkpoint_uuid", "source_trial_id", "stop_once"),
                    *("time_metric", "train_stragglers", "unit"),
                ),
                _ANY,
            ),
        },
    }
)

# Sections that a cluster reads and zero_trial does not look into.
OPEN = frozenset(
    (
        *("bind_mounts", "checkpoint_storage", "data_layer", "environment", "integrations", "internal", "labels"),
        *("log_policies", "log_pattern_policies", "optimizations", "pbs", "preemption_timeout", "profiling", "project"),
        *("retention_policy", "security", "slurm", "tensorboard_storage", "workspace"),
    )
)
