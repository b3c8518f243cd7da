"""Slots and precision against a machine."""

from __future__ import annotations

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.launch.this_host import HostDevices
from zero_trial.planning.machine import check_machine

WHERE = "const.yaml:4 resources.slots_per_trial"


def said(slots: int, devices: HostDevices, **config: object) -> list[str]:
    found = check_machine(slots, WHERE, devices, read_ds_config(config))
    return [f"{issue.severity.value}: {issue.text}" for issue in found]


def test_more_slots_than_gpus():
    assert said(8, HostDevices(cores=64, gpus=2)) == [
        "error: const.yaml:4 resources.slots_per_trial: more ranks than GPUs: got 8, expected at most 2 (this host's GPUs). "
        "Use --slots 2, or CUDA_VISIBLE_DEVICES= to train on the CPU."
    ]
    assert said(2, HostDevices(cores=1, gpus=2)) == []


def test_more_slots_than_cores_is_slow_and_no_fault():
    assert said(8, HostDevices(cores=2, gpus=0)) == [
        "warn: const.yaml:4 resources.slots_per_trial: 8 ranks share 2 cores of this machine, which has no GPU. "
        "Use --slots 2 to try it here."
    ]


def test_no_slots():
    assert said(0, HostDevices(cores=2, gpus=0))[0].startswith(
        "error: const.yaml:4 resources.slots_per_trial: a run needs"
    )


def test_fp16_without_a_gpu():
    fp16 = {"enabled": True}
    assert said(1, HostDevices(cores=2, gpus=0), fp16=fp16) == [
        "warn: fp16.enabled: fp16 on a machine without a GPU: it is slow there, and its gradients need a loss scale. "
        'Use "bf16": {"enabled": true} in its place; the processor supports it.'
    ]
    assert said(1, HostDevices(cores=2, gpus=1), fp16=fp16) == []
