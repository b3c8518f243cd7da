"""The sections of an experiment's YAML: the type and default of each key."""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero_trial.schema.document import shown
from zero_trial.schema.types import (
    RULE,
    AnyOf,
    Bool,
    Field,
    Fields,
    Int,
    Issue,
    ListOf,
    MapOf,
    Path,
    Reading,
    Tagged,
    Type,
    ValidationError,
    exact_float,
    exact_int,
    exact_text,
    not_a_map,
)

# Keys that many sections share.
TEXT = Field(exact_text())
NEEDED_TEXT = Field(exact_text(), required=True)
_HIDDEN_TEXT = Field(exact_text(), shown=False)
OFF = Field(Bool(), False)
ON = Field(Bool(), True)

_UNITS = ("batches", "epochs", "records")


@dataclass(frozen=True)
class Period:
    """``count`` of ``unit``; batches are optimizer steps. A count of 0 means never."""

    unit: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


@dataclass(frozen=True)
class PeriodOf(Type):
    """``{batches: 100}``, ``{epochs: 2}``, ``{records: 5}`` or a bare number of batches."""

    low: int = 0

    def describe(self) -> str:
        return "{batches: n}, {epochs: n}, {records: n} or a number of batches"

    def read(self, value: Any) -> Reading:
        unit, count = "batches", value
        if isinstance(value, Mapping):
            if len(value) != 1 or next(iter(value)) not in _UNITS:
                raise ValidationError(self.describe())
            unit, count = next(iter(value.items()))
        try:
            return Reading(Period(unit, Int(self.low).read(count).value))
        except ValidationError as error:
            raise ValidationError(self.describe(), f"{shown(count)} is not {error.expected}.") from None


# A length or a period: {batches: n}, {records: n} or {epochs: n}; for a search also a bare number.


_WORDS = 'a length object must have one attribute named "batches", "records", or "epochs"'


def _length(low: int) -> tuple[Fields, ...]:
    return tuple(Fields({unit: Field(exact_int(low), required=True)}) for unit in ("batches", "records", "epochs"))


PERIOD = AnyOf(_length(0), _WORDS)

SEARCHER_LENGTH = AnyOf((*_length(1), exact_int(1)), f"{_WORDS}, with a positive integer")


@dataclass(frozen=True)
class Arranged(ListOf):
    """A list that ``arrange`` sorts in a completed configuration."""

    arrange: Callable[[list[Any]], list[Any]] = list

    def fill(self, value: Any) -> Any:
        return self.arrange([self.item.fill(inner) for inner in value])


# ``searcher``: the four searches of new experiments, and replacements for removed ones.


def _one_source(section: Mapping[str, Any]) -> str | None:
    both = section.get("source_trial_id") is not None and section.get("source_checkpoint_uuid") is not None
    return "at most one of source_trial_id or source_checkpoint_uuid may be set" if both else None


def _has_length(section: Mapping[str, Any]) -> str | None:
    if section.get("max_time") is not None and section.get("time_metric") is not None:
        return None
    length = section.get("max_length")
    unit, count = next(iter(length.items())) if isinstance(length, Mapping) else ("batches", length or 1000)
    instead = "" if length is None else " instead of max_length"
    return f"max_time and time_metric are required. Write max_time: {count} and time_metric: {unit}{instead}"


SEARCHER_COMMON = {
    "metric": NEEDED_TEXT,
    "smaller_is_better": ON,
    "source_trial_id": Field(exact_int()),
    "source_checkpoint_uuid": TEXT,
}


def _kind(name: str, *checks: Any, **keys: Field) -> Fields:
    named = {"name": Field(exact_text((name,)), required=True), **SEARCHER_COMMON, **keys}
    return Fields(named, (_one_source, *checks))


_CONCURRENT = Field(exact_int(0), 16)

_TRIALS = Field(exact_int(1), required=True)

_MAX_LENGTH = Field(SEARCHER_LENGTH, shown=False)

SEARCHER = Tagged(
    "name",
    {
        "single": _kind("single", max_length=_MAX_LENGTH),
        "random": _kind("random", max_length=_MAX_LENGTH, max_trials=_TRIALS, max_concurrent_trials=_CONCURRENT),
        "grid": _kind("grid", max_length=_MAX_LENGTH, max_concurrent_trials=_CONCURRENT),
        "adaptive_asha": _kind(
            "adaptive_asha",
            _has_length,
            max_trials=_TRIALS,
            max_time=Field(exact_int(1)),
            time_metric=TEXT,
            max_length=_MAX_LENGTH,
            max_concurrent_trials=_CONCURRENT,
            mode=Field(exact_text(("aggressive", "standard", "conservative")), "standard"),
            divisor=Field(exact_float(above=1), 4),
            max_rungs=Field(exact_int(1), 5),
            bracket_rungs=Field(Arranged(exact_int(1), partial(sorted, reverse=True)), []),
            stop_once=Field(Bool(), shown=False),
        ),
    },
    'is not an object where object["name"] is one of single, random, grid or adaptive_asha',
    {
        "adaptive": "adaptive was removed. Use adaptive_asha with max_trials instead of budget.",
        "adaptive_simple": "adaptive_simple was removed. Use adaptive_asha with the same max_trials.",
        "sync_halving": "sync_halving was removed. Use adaptive_asha with bracket_rungs: [num_rungs].",
        "async_halving": "async_halving was removed. Use adaptive_asha with bracket_rungs: [num_rungs].",
        "pbt": "pbt was removed. Use adaptive_asha, or random.",
        "custom": "custom searchers were removed. Use single, random, grid or adaptive_asha.",
    },
)


# ``checkpoint_storage``: where checkpoints are stored, and how many are kept.


_KEPT = {
    "save_experiment_best": Field(exact_int(0), 0),
    "save_trial_best": Field(exact_int(0), 1),
    "save_trial_latest": Field(exact_int(0), 1),
}

STORAGE_KEPT = tuple(_KEPT)


def _kind_storage(name: str, *checks: Any, **keys: Field) -> Fields:
    return Fields({"type": Field(exact_text((name,)), required=True), **keys, **_KEPT}, checks)


def _inside_host_path(section: Mapping[str, Any]) -> str | None:
    inner, host = section.get("storage_path"), posixpath.normpath(section["host_path"])
    if inner is None:
        return None
    path = posixpath.normpath(inner)
    inside = (
        path == host or path.startswith(host.rstrip("/") + "/") if path.startswith("/") else path.split("/")[0] != ".."
    )
    return None if inside else "storage_path must either be a relative directory or a subdirectory of host_path"


def _one_credential(section: Mapping[str, Any]) -> str | None:
    given = [section.get(name) is not None for name in ("connection_string", "account_url", "credential")]
    if given[0] == given[1]:
        return "exactly one of connection_string or account_url must be set"
    return "credential and connection_string must not both be set" if given[0] and given[2] else None


def _prefix(section: Mapping[str, Any]) -> str | None:
    inside = (section.get("prefix") or "").split("/")
    return "prefix must not contain .." if ".." in inside else None


STORAGE = Tagged(
    "type",
    {
        "shared_fs": _kind_storage(
            "shared_fs",
            _inside_host_path,
            host_path=NEEDED_TEXT,
            storage_path=TEXT,
            propagation=Field(exact_text(), "rprivate"),
            container_path=_HIDDEN_TEXT,
            checkpoint_path=_HIDDEN_TEXT,
            tensorboard_path=_HIDDEN_TEXT,
        ),
        "directory": _kind_storage("directory", container_path=NEEDED_TEXT),
        "s3": _kind_storage(
            "s3",
            _prefix,
            bucket=NEEDED_TEXT,
            **dict.fromkeys(("access_key", "secret_key", "endpoint_url", "prefix"), TEXT),
        ),
        "gcs": _kind_storage("gcs", _prefix, bucket=NEEDED_TEXT, prefix=TEXT),
        "azure": _kind_storage(
            "azure",
            _one_credential,
            container=NEEDED_TEXT,
            **dict.fromkeys(("connection_string", "account_url", "credential"), _HIDDEN_TEXT),
        ),
    },
    'is not an object where object["type"] is one of shared_fs, directory, s3, gcs or azure',
    {"hdfs": "hdfs is no longer supported. Use shared_fs, directory, s3, gcs or azure."},
)


TENSORBOARD = Tagged(
    "type",
    {
        name: Fields({key: field for key, field in STORAGE.kinds[name].keys.items() if key not in _KEPT})
        for name in ("shared_fs", "s3", "gcs")
    },
    "is not a checkpoint storage",
)


# ``environment``, ``resources``, ``bind_mounts``: the container in which a cluster runs a trial. A
# run on this machine checks these sections but uses little of them.


HARDWARE = ("cpu", "cuda", "rocm")
"""Images and environment variables differ by what a task runs on."""

IMAGES = {
    "cpu": "determinedai/pytorch-ngc-dev:0736b6d",
    "cuda": "determinedai/pytorch-ngc-dev:0736b6d",
    "rocm": "determinedai/environments:rocm-5.6-pytorch-1.3-tf-2.10-rocm-mpich-0736b6d",
}
"""What a cluster runs where an experiment names no image."""

_FIXED_IN_A_CONTAINER = (
    *("image", "command", "args", "working_dir", "ports", "liveness_probe", "readiness_probe", "startup_probe"),
    *("lifecycle", "termination_message_path", "termination_message_policy", "image_pull_policy"),
)
_CONTAINER = "determined-container"
POD_KEYS = ("kind", "apiVersion", "metadata", "spec", "status")


class _PodSpec(Type):
    """A Kubernetes pod; fields that Determined controls must not be set."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        issues = [
            Issue((*path, key), RULE, "is not a configurable option") for key in ("name", "name_space") if key in value
        ]
        spec = value.get("spec") or {}
        containers = spec.get("containers") or [] if isinstance(spec, Mapping) else None
        if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers):
            return [*issues, Issue((*path, "spec"), RULE, "is not a valid pod spec")]
        return issues + [
            Issue((*path, "spec", "containers", index, key), RULE, "is not configurable")
            for index, item in enumerate(containers)
            for key in _FIXED_IN_A_CONTAINER
            if key in item and item.get("name", _CONTAINER) == _CONTAINER
        ]

    def fill(self, value: Any) -> Any:
        pod = {key: copy.deepcopy(value[key]) for key in POD_KEYS if value.get(key) is not None}
        return {
            **pod,
            "metadata": {"creationTimestamp": None, **pod.get("metadata", {})},
            "spec": {"containers": None, **pod.get("spec", {})},
            "status": pod.get("status", {}),
        }


_TEXTS = ListOf(exact_text())

_ABSOLUTE = r"\A/"

BIND_MOUNTS = ListOf(
    Fields(
        {
            "host_path": Field(
                exact_text(pattern=_ABSOLUTE, otherwise="host_path must be an absolute path"), required=True
            ),
            "container_path": Field(
                exact_text(pattern=r"\A(?!\.\Z)", otherwise='container_path must not be "."'), required=True
            ),
            "read_only": OFF,
            "propagation": Field(exact_text(), "rprivate"),
        }
    )
)

_DEVICES = ListOf(
    Fields(
        {
            "host_path": NEEDED_TEXT,
            "container_path": NEEDED_TEXT,
            "mode": Field(exact_text(), "mrw"),
        }
    )
)

_PROXY_PORTS = ListOf(
    Fields(
        {
            "proxy_port": Field(exact_int(1, 65535), required=True),
            "proxy_tcp": OFF,
            "unauthenticated": OFF,
            "default_service_id": OFF,
        }
    )
)

_REGISTRY_AUTH = Fields(
    dict.fromkeys(("username", "password", "auth", "email", "serveraddress", "identitytoken", "registrytoken"), TEXT)
)

ENVIRONMENT = Fields(
    {
        "image": Field(Fields({name: Field(exact_text(), image) for name, image in IMAGES.items()}), {}),
        "environment_variables": Field(Fields({name: Field(_TEXTS, []) for name in HARDWARE}), {}),
        "ports": Field(MapOf(exact_int()), {}),
        "proxy_ports": Field(_PROXY_PORTS, []),
        "force_pull_image": OFF,
        "registry_auth": Field(_REGISTRY_AUTH),
        "pod_spec": Field(_PodSpec()),
        "add_capabilities": Field(_TEXTS, []),
        "drop_capabilities": Field(_TEXTS, []),
    }
)


def _fits_max_slots(section: Mapping[str, Any]) -> str | None:
    each, most = section.get("slots_per_trial"), section.get("max_slots")
    return None if most is None or (1 if each is None else each) <= most else "slots_per_trial must be <= max_slots"


RESOURCES = Fields(
    {
        "slots_per_trial": Field(exact_int(0), 1),
        "max_slots": Field(exact_int(0)),
        "weight": Field(exact_float(low=0), 1),
        "priority": Field(exact_int(1, 99), 42),
        "resource_pool": Field(exact_text(), ""),
        "is_single_node": Field(Bool()),
        "native_parallel": OFF,
        "shm_size": Field(
            AnyOf((exact_int(0),), "is not a number of bytes; a cluster also rejects strings such as 4g")
        ),
        "devices": Field(_DEVICES, []),
        "slots": Field(exact_int(), shown=False),  # for commands; only valid in a template
        "agent_label": Field(exact_text(), shown=False),
    },
    (_fits_max_slots,),
)


# The smaller sections of an experiment: logging, profiling, retention, and other schedulers.


def _names_or_matches(section: Mapping[str, Any]) -> str | None:
    if section.get("name") is None and None in (section.get("pattern"), section.get("action")):
        return "a log policy needs a name, or a pattern and an action"
    try:
        why = compile_pattern(section.get("pattern") or "")[1]
    except ImportError:
        return None  # the regex library is a dependency of determined: if it is missing, the master checks
    return f"pattern is not a regular expression in RE2's syntax: {why}" if why else None


def compile_pattern(text: str) -> tuple[Any, str]:
    """Compile a pattern in Go's syntax. Return the pattern and "", or None and the error message.
    Raises ImportError if RE2 is not installed."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options), ""
    except re2.error as error:
        why = error.args[0] if error.args else "unknown"
        return None, why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)


DEFAULT_POLICIES = (
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*"},
)


class _LogPolicies(ListOf):
    """Policies with different names. A cluster's default policies are appended unless the list has
    one of the same name; a policy without a pattern disables the default one."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        issues = super().check(value, path)
        names = [item["name"] for item in value if item.get("name") is not None] if not issues else []
        twice = {name for name in names if names.count(name) > 1}
        return issues + [Issue(path, RULE, f"two policies have the name {shown(name)}") for name in sorted(twice)]

    def fill(self, value: Any) -> Any:
        names = [item.get("name") for item in value]
        return super().fill([*value, *(policy for policy in DEFAULT_POLICIES if policy["name"] not in names)])


LOG_POLICIES = _LogPolicies(
    Fields(
        {
            "name": _HIDDEN_TEXT,
            "pattern": _HIDDEN_TEXT,
            "action": Field(exact_text(("cancel_retries", "exclude_node")), shown=False),
        },
        (_names_or_matches,),
    )
)


def _begins_before_end(section: Mapping[str, Any]) -> str | None:
    begin, end = section.get("begin_on_batch"), section.get("end_after_batch")
    return "begin_on_batch must be <= end_after_batch" if None not in (begin, end) and begin > end else None  # type: ignore[operator]


PROFILING = Fields(
    {
        "enabled": OFF,
        "begin_on_batch": Field(exact_int(0), 0),
        "end_after_batch": Field(exact_int(0)),
        "sync_timings": ON,
    },
    (_begins_before_end,),
)

OPTIMIZATIONS = Fields(
    {
        "aggregation_frequency": Field(exact_int(1), 1),
        "auto_tune_tensor_fusion": OFF,
        "average_aggregated_gradients": ON,
        "average_training_metrics": ON,
        "gradient_compression": OFF,
        "grad_updates_size_file": TEXT,
        "mixed_precision": Field(exact_text(("O0", "O1", "O2", "O3")), "O0"),
        "tensor_fusion_cycle_time": Field(exact_int(0), 1),
        "tensor_fusion_threshold": Field(exact_int(0), 64),
    }
)

REPRODUCIBILITY = Fields({"experiment_seed": Field(exact_int(0, 2**32 - 1))})

RETENTION = Fields({"log_retention_days": Field(exact_int(-1, 32767), required=True)})

SECURITY = Fields({"kerberos": Field(Fields({"config_file": NEEDED_TEXT}))})


def _batch_system(arguments: str) -> Fields:
    return Fields(
        {
            "slots_per_node": Field(exact_int(1), shown=False),
            "gpu_type": _HIDDEN_TEXT,
            arguments: Field(ListOf(exact_text()), shown=False),
        }
    )


SLURM = _batch_system("sbatch_args")

PBS = _batch_system("pbsbatch_args")

_PACHYDERM = Fields(
    {
        "pachd": Field(Fields({"host": TEXT, "port": Field(exact_float())})),
        "proxy": Field(Fields({"scheme": TEXT, "host": TEXT, "port": Field(exact_float())})),
        "dataset": Field(Fields(dict.fromkeys(("project", "repo", "commit", "branch", "token"), TEXT))),
    }
)

_WEBHOOKS = Fields(
    {
        "webhook_id": Field(ListOf(exact_int()), shown=False),
        "webhook_name": Field(ListOf(exact_text()), shown=False),
        "exclude": Field(Bool(), False, shown=False),
    }
)

INTEGRATIONS = Fields({"pachyderm": Field(_PACHYDERM, shown=False), "webhooks": Field(_WEBHOOKS, shown=False)})
