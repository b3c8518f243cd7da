"""The machine and its queue."""

from __future__ import annotations

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.agent.environment import SlotDevices
from zero_trial.master.records import NotFound

WHOLE = {"slots_per_trial": 2}


def test_slots_and_their_holders(master: Sandbox) -> None:
    master.create()
    held, free = master.machine.slots()
    assert (
        held.allocation_id == master.run_of(1).allocation.id
        and free.allocation_id is None
        and held.device_type == "cpu"
    )
    (pool,) = master.machine.resource_pools()
    assert (pool.slots, pool.used, pool.slot_type) == (2, 1, "cpu")
    (agent,) = master.machine.agents()
    assert [slot.number for slot in agent.slots] == [0, 1]


def test_gpus_by_name(master: Sandbox) -> None:
    master.state.devices = SlotDevices(2, 8, ("4", "GPU-a"))
    assert [(slot.device_type, slot.name) for slot in master.machine.slots()] == [
        ("cuda", "GPU 4"),
        ("cuda", "GPU GPU-a"),
    ]
    master.create()
    assert master.run_of(1).visible_devices == "4"


def test_a_disabled_slot_is_not_given_out(master: Sandbox) -> None:
    master.machine.set_slot_enabled(0, False)
    master.create(resources=WHOLE)
    assert master.runs() == []
    assert [slot.enabled for slot in master.machine.slots()] == [False, True]
    master.machine.set_slot_enabled(0, True)
    assert len(master.runs()) == 1
    with pytest.raises(NotFound):
        master.machine.set_slot_enabled(2, False)


def test_the_queue(master: Sandbox) -> None:
    for priority in (42, 42, 7):
        master.create(resources={**WHOLE, "priority": priority})
    jobs = master.machine.jobs()
    assert [(job.experiment_id, job.state, job.jobs_ahead) for job in jobs] == [
        (1, "SCHEDULED", 0),
        (3, "QUEUED", 0),
        (2, "QUEUED", 1),
    ]
    assert (jobs[0].requested_slots, jobs[0].allocated_slots, jobs[1].allocated_slots) == (2, 2, 0)


def test_the_clusters_identity_outlives_a_restart(master: Sandbox) -> None:
    before = master.machine.info
    master.restart()
    assert master.machine.info == before and before.version == "0.38.1"
    assert master.machine.log_file == master.directory.log
