"""``environment``, ``resources`` and ``bind_mounts``."""

from __future__ import annotations

import pytest

from tests.experiment.written import judge, section

SIZE = "is not a number of bytes; a cluster refuses texts such as 4g, too"


@pytest.mark.parametrize(
    ("resources", "fault"),
    [
        ("{}", None),
        ("null", None),
        ("{slots_per_trial: 0}", None),
        ("{slots_per_trial: 8, max_slots: 8, weight: 2.5, priority: 99, resource_pool: big}", None),
        ("{shm_size: 1073741824}", None),
        ("{shm_size: 1.5g}", f"resources.shm_size: {SIZE}"),
        ("{devices: [/dev/a:/dev/b, {host_path: /dev/c, container_path: /dev/d, mode: r}]}", None),
        ("{is_single_node: true, native_parallel: false}", None),
        ("{agent_label: x, slots: null}", None),
        ("{slots: 3}", "resources.slots: is for commands. Write slots_per_trial."),
        ("{slots_per_trial: -1}", "resources.slots_per_trial: -1 is less than 0"),
        ("{slots_per_trial: two}", 'resources.slots_per_trial: "two" is not an integer'),
        ("{slots_per_trial: 2.0}", None),
        ("{slots_per_trial: 2.5}", "resources.slots_per_trial: 2.5 is not an integer"),
        ("{slots_per_trail: 2}", 'resources.slots_per_trail: unknown property. Did you mean "slots_per_trial"?'),
        ("{slots_per_trial: 4, max_slots: 2}", "resources: slots_per_trial must be <= max_slots"),
        ("{max_slots: 0}", "resources: slots_per_trial must be <= max_slots"),
        ("{priority: 0}", "resources.priority: 0 is less than 1"),
        ("{priority: 100}", "resources.priority: 100 is more than 99"),
        ("{weight: -1}", "resources.weight: -1 is less than 0"),
        ("{weight: heavy}", 'resources.weight: "heavy" is not a number'),
        ("{resource_pool: 3}", "resources.resource_pool: 3 is not a string"),
        ("{shm_size: -1}", f"resources.shm_size: {SIZE}"),
        ("{devices: [/dev/a]}", 'resources.devices[0]: "/dev/a" is not a map'),
        ("{devices: [{host_path: /dev/a}]}", "resources.devices[0].container_path: is a required property"),
        ("{native_parallel: 1}", "resources.native_parallel: 1 is neither true nor false"),
        ("2", "resources: 2 is not a map"),
    ],
)
def test_resources(resources: str, fault: str | None):
    judge(f"resources: {resources}", fault)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ("{}", None),
        ("{image: a/b:c}", None),
        ("{image: {cpu: a, cuda: b, rocm: c}}", None),
        ("{image: {cpu: a, gpu: b}}", None),
        ("{image: {cpu: a}}", None),
        ("{environment_variables: [A=1, B]}", None),
        ("{environment_variables: {cpu: [A=1], gpu: [A=2]}}", None),
        ("{ports: {web: 80}, force_pull_image: true}", None),
        ("{proxy_ports: [{proxy_port: 8080, proxy_tcp: true, unauthenticated: true}]}", None),
        ("{registry_auth: {username: u, password: p, serveraddress: s, email: e}}", None),
        ("{add_capabilities: [NET_ADMIN], drop_capabilities: [CHOWN]}", None),
        ("{pod_spec: {spec: {containers: [{name: x, resources: {}}]}, metadata: {labels: {}}}}", None),
        ("{image: 3}", "environment.image: 3 is not a map"),
        ("{image: {cpu: 3}}", "environment.image.cpu: 3 is not a string"),
        ("{image: {tpu: x}}", "environment.image.tpu: unknown property."),
        ("{environment_variables: A=1}", 'environment.environment_variables: "A=1" is not a map'),
        ("{environment_variables: [1]}", "environment.environment_variables.cpu[0]: 1 is not a string"),
        ("{environment_variables: {cpu: A=1}}", 'environment.environment_variables.cpu: "A=1" is not a list'),
        ("{ports: {web: eighty}}", 'environment.ports.web: "eighty" is not an integer'),
        ("{ports: [80]}", "environment.ports: [80] is not a map"),
        ("{proxy_ports: [{proxy_tcp: true}]}", "environment.proxy_ports[0].proxy_port: is a required property"),
        ("{proxy_ports: [{proxy_port: 0}]}", "environment.proxy_ports[0].proxy_port: 0 is less than 1"),
        ("{registry_auth: {user: u}}", "environment.registry_auth.user: unknown property."),
        ("{force_pull_image: always}", 'environment.force_pull_image: "always" is neither true nor false'),
        ("{add_capabilities: NET_ADMIN}", 'environment.add_capabilities: "NET_ADMIN" is not a list'),
        ("{pod_spec: {name: x}}", "environment.pod_spec.name: is not a configurable option"),
        (
            "{pod_spec: {spec: {containers: [{image: x}]}}}",
            "environment.pod_spec.spec.containers[0].image: is not configurable",
        ),
        ("{pod_spec: {spec: {containers: x}}}", "environment.pod_spec.spec: is not a pod's"),
        ("{pod_spec: 3}", "environment.pod_spec: 3 is not a map"),
        ("{variables: []}", "environment.variables: unknown property."),
    ],
)
def test_environment(environment: str, fault: str | None):
    judge(f"environment: {environment}", fault)


@pytest.mark.parametrize(
    ("mounts", "fault"),
    [
        ("[]", None),
        ("[{host_path: /a, container_path: /b}]", None),
        ("[{host_path: /a, container_path: b, read_only: true, propagation: rshared}]", None),
        ("[{host_path: a, container_path: /b}]", "bind_mounts[0].host_path: host_path must be an absolute path"),
        ("[{host_path: /a, container_path: .}]", 'bind_mounts[0].container_path: container_path must not be "."'),
        ("[{host_path: /a}]", "bind_mounts[0].container_path: is a required property"),
        ("[{host_path: /a, container_path: /b, mode: r}]", "bind_mounts[0].mode: unknown property."),
        ("[/a:/b]", 'bind_mounts[0]: "/a:/b" is not a map'),
        (
            "{host_path: /a, container_path: /b}",
            'bind_mounts: {container_path: "/b", host_path: "/a"} is not a list',
        ),
    ],
)
def test_bind_mounts(mounts: str, fault: str | None):
    judge(f"bind_mounts: {mounts}", fault)


def test_defaults():
    assert section("{}", "resources")["slots_per_trial"] == 1
    assert section("bind_mounts: [{host_path: /a, container_path: /b}]", "bind_mounts") == [
        {"host_path": "/a", "container_path": "/b", "read_only": False, "propagation": "rprivate"}
    ]
    assert section("{}", "environment")["environment_variables"] == {"cpu": [], "cuda": [], "rocm": []}
    assert section("resources: {devices: [/dev/a:/dev/b]}", "resources")["devices"][0]["mode"] == "mrw"
