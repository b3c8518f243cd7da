"""The smaller sections of an experiment: what is logged, profiled, kept, and run on other schedulers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.rules import Flag, Key, Kinds, Many, Number, Section, Text, Whole


def _names_or_matches(section: Mapping[str, Any]) -> str | None:
    if section.get("name") is None and section.get("pattern") is None:
        return "a log policy needs a name or a pattern"
    try:
        re.compile(section.get("pattern") or "")
    except re.error as problem:
        return f"pattern is not a regular expression: {problem}"
    return None


LOG_POLICIES = Many(
    Section(
        {
            "name": Key(Text()),
            "pattern": Key(Text()),
            "action": Key(Text(("cancel_retries", "exclude_node"))),
        },
        (_names_or_matches,),
    )
)


def _begins_before_end(section: Mapping[str, Any]) -> str | None:
    begin, end = section.get("begin_on_batch"), section.get("end_after_batch")
    return "begin_on_batch must be <= end_after_batch" if None not in (begin, end) and begin > end else None  # type: ignore[operator]


PROFILING = Section(
    {
        "enabled": Key(Flag(), False),
        "begin_on_batch": Key(Whole(0), 0),
        "end_after_batch": Key(Whole(0)),
        "sync_timings": Key(Flag(), True),
    },
    (_begins_before_end,),
)

OPTIMIZATIONS = Section(
    {
        "aggregation_frequency": Key(Whole(1), 1),
        "auto_tune_tensor_fusion": Key(Flag(), False),
        "average_aggregated_gradients": Key(Flag(), True),
        "average_training_metrics": Key(Flag(), True),
        "gradient_compression": Key(Flag(), False),
        "grad_updates_size_file": Key(Text()),
        "mixed_precision": Key(Text(("O0", "O1", "O2", "O3")), "O0"),
        "tensor_fusion_cycle_time": Key(Whole(0), 5),
        "tensor_fusion_threshold": Key(Whole(0), 64),
    }
)

REPRODUCIBILITY = Section({"experiment_seed": Key(Whole(0, 2**31 - 1))})
RETENTION = Section({"log_retention_days": Key(Whole(-1, 32767))})
SECURITY = Section({"kerberos": Key(Section({"config_file": Key(Text(), required=True)}))})

_ABSOLUTE = r"\A/"


def _absolute(name: str) -> Key:
    return Key(Text(pattern=_ABSOLUTE, otherwise=f"{name} must be an absolute path"))


def _cached_bucket(name: str, **more: Key) -> Section:
    return Section(
        {
            "type": Key(Text((name,)), required=True),
            "bucket": Key(Text(), required=True),
            "bucket_directory_path": Key(Text(), required=True),
            "local_cache_host_path": _absolute("local_cache_host_path"),
            "local_cache_container_path": _absolute("local_cache_container_path"),
            **more,
        },
        (_whole_cache,),
    )


def _whole_cache(section: Mapping[str, Any]) -> str | None:
    given = [section.get(f"local_cache_{where}_path") is not None for where in ("host", "container")]
    if given[0] != given[1]:
        return "local_cache_host_path and local_cache_container_path must be set together"
    return None


DATA_LAYER = Kinds(
    "type",
    {
        "shared_fs": Section(
            {
                "type": Key(Text(("shared_fs",)), required=True),
                "host_storage_path": _absolute("host_storage_path"),
                "container_storage_path": _absolute("container_storage_path"),
            }
        ),
        "s3": _cached_bucket("s3", access_key=Key(Text()), secret_key=Key(Text()), endpoint_url=Key(Text())),
        "gcs": _cached_bucket("gcs"),
    },
    'is not an object where object["type"] is one of shared_fs, s3 or gcs',
)


def _batch_system(arguments: str) -> Section:
    return Section({"slots_per_node": Key(Whole(1)), "gpu_type": Key(Text()), arguments: Key(Many(Text()), [])})


SLURM = _batch_system("sbatch_args")
PBS = _batch_system("pbsbatch_args")

_PACHYDERM = Section(
    {
        "pachd": Key(Section({"host": Key(Text()), "port": Key(Number())})),
        "proxy": Key(Section({"scheme": Key(Text()), "host": Key(Text()), "port": Key(Number())})),
        "dataset": Key(Section({name: Key(Text()) for name in ("project", "repo", "commit", "branch", "token")})),
    }
)
_WEBHOOKS = Section(
    {
        "webhook_id": Key(Many(Whole())),
        "webhook_name": Key(Many(Text())),
        "exclude": Key(Flag(), False),
    }
)
INTEGRATIONS = Section({"pachyderm": Key(_PACHYDERM), "webhooks": Key(_WEBHOOKS)})
