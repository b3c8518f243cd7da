"""``checkpoint_storage``: where checkpoints go, and how many of them are kept."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.rules import Key, Kinds, Section, Text, Whole

_KEPT = {
    "save_experiment_best": Key(Whole(0), 0),
    "save_trial_best": Key(Whole(0), 1),
    "save_trial_latest": Key(Whole(0), 1),
}
COMMON = tuple(_KEPT)


def _kind(name: str, **keys: Key) -> Section:
    checks = {"shared_fs": (_inside_host_path,), "azure": (_one_credential,), "s3": (_prefix,), "gcs": (_prefix,)}
    return Section({"type": Key(Text((name,)), required=True), **keys, **_KEPT}, checks.get(name, ()))


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
    given = [name for name in ("connection_string", "account_url") if section.get(name) is not None]
    return None if len(given) == 1 else "Exactly one of connection_string or account_url must be set"


def _prefix(section: Mapping[str, Any]) -> str | None:
    inside = (section.get("prefix") or "").split("/")
    return "prefix must not contain .." if ".." in inside else None


STORAGE = Kinds(
    "type",
    {
        "shared_fs": _kind(
            "shared_fs",
            host_path=Key(Text(), required=True),
            storage_path=Key(Text()),
            propagation=Key(Text(), "rprivate"),
            container_path=Key(Text()),
            checkpoint_path=Key(Text()),
            tensorboard_path=Key(Text()),
        ),
        "directory": _kind("directory", container_path=Key(Text(), required=True)),
        "s3": _kind(
            "s3",
            bucket=Key(Text(), required=True),
            access_key=Key(Text()),
            secret_key=Key(Text()),
            endpoint_url=Key(Text()),
            prefix=Key(Text()),
        ),
        "gcs": _kind("gcs", bucket=Key(Text(), required=True), prefix=Key(Text())),
        "azure": _kind(
            "azure",
            container=Key(Text(), required=True),
            connection_string=Key(Text()),
            account_url=Key(Text()),
            credential=Key(Text()),
        ),
    },
    'is not an object where object["type"] is one of shared_fs, directory, s3, gcs or azure',
    {"hdfs": "hdfs is supported no more. Use shared_fs, directory, s3, gcs or azure."},
)
