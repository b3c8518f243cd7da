"""``environment``, ``resources``, ``bind_mounts``: the container that a cluster runs a trial in. Here they are checked, and mostly not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.rules import Flag, Key, Many, Map, Number, Plain, Section, Text, Whole, shown

HARDWARE = ("cpu", "cuda", "rocm")
"""Images and environment variables differ by what a task runs on."""

_FIXED_IN_A_CONTAINER = (
    *("image", "command", "args", "working_dir", "ports", "env_from", "env", "liveness_probe", "readiness_probe"),
    *("startup_probe", "lifecycle", "termination_message_path", "termination_message_policy", "image_pull_policy"),
    "security_context",
)


class PodSpec(Plain):
    """A Kubernetes pod, as far as a master looks at it: what Determined itself decides may not be set."""

    def check(self, value: Any, path: str) -> list[str]:
        if not isinstance(value, Mapping):
            return [f"{path}: {shown(value)} is not a map"]
        faults = [f"{path}.{key}: is not a configurable option" for key in ("name", "name_space") if key in value]
        spec = value.get("spec") or {}
        containers = spec.get("containers") or [] if isinstance(spec, Mapping) else None
        if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers):
            return [*faults, f"{path}.spec: is not a pod's"]
        return faults + [
            f"{path}.spec.containers[{index}].{key}: is not configurable"
            for index, item in enumerate(containers)
            for key in _FIXED_IN_A_CONTAINER
            if key in item
        ]


_TEXTS = Many(Text())
_ABSOLUTE = r"\A/"

BIND_MOUNTS = Many(
    Section(
        {
            "host_path": Key(Text(pattern=_ABSOLUTE, otherwise="host_path must be an absolute path"), required=True),
            "container_path": Key(
                Text(pattern=r"\A(?!\.\Z)", otherwise='container_path must not be "."'), required=True
            ),
            "read_only": Key(Flag(), False),
            "propagation": Key(Text(), "rprivate"),
        }
    )
)

_DEVICES = Many(
    Section(
        {
            "host_path": Key(Text(), required=True),
            "container_path": Key(Text(), required=True),
            "mode": Key(Text(), "mrw"),
        }
    )
)

_PROXY_PORTS = Many(
    Section(
        {
            "proxy_port": Key(Whole(1, 65535), required=True),
            "proxy_tcp": Key(Flag(), False),
            "unauthenticated": Key(Flag(), False),
        }
    )
)

_REGISTRY_AUTH = Section(
    {
        name: Key(Text())
        for name in ("username", "password", "auth", "email", "serveraddress", "identitytoken", "registrytoken")
    }
)

ENVIRONMENT = Section(
    {
        "image": Key(Section({name: Key(Text()) for name in HARDWARE}), {}),
        "environment_variables": Key(Section({name: Key(_TEXTS, []) for name in HARDWARE}), {}),
        "ports": Key(Map(Whole()), {}),
        "proxy_ports": Key(_PROXY_PORTS, []),
        "force_pull_image": Key(Flag(), False),
        "registry_auth": Key(_REGISTRY_AUTH),
        "pod_spec": Key(PodSpec()),
        "add_capabilities": Key(_TEXTS, []),
        "drop_capabilities": Key(_TEXTS, []),
    }
)


def _fits_max_slots(section: Mapping[str, Any]) -> str | None:
    each, most = section.get("slots_per_trial"), section.get("max_slots")
    return None if most is None or (1 if each is None else each) <= most else "slots_per_trial must be <= max_slots"


RESOURCES = Section(
    {
        "slots_per_trial": Key(Whole(0), 1),
        "max_slots": Key(Whole(0)),
        "weight": Key(Number(low=0), 1),
        "priority": Key(Whole(1, 99)),
        "resource_pool": Key(Text(), ""),
        "is_single_node": Key(Flag()),
        "native_parallel": Key(Flag(), False),
        "shm_size": Key(Whole(0)),
        "devices": Key(_DEVICES, []),
        "slots": Key(Whole()),
        "agent_label": Key(Text()),
    },
    (_fits_max_slots,),
)
