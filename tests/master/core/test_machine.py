"""The machine and its queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.agent.resources import Node
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import NotFound

WHOLE = {"slots_per_trial": 2}


def test_slots_and_their_holders(master: Sandbox) -> None:
    master.create()
    held, free = master.machine.slots()
    assert (held.allocation_id, free.allocation_id) == (master.run_of(1).allocation.id, None)
    assert held.device_type == "cpu"
    (pool,) = master.machine.resource_pools()
    assert (pool.slots, pool.used, pool.slot_type) == (2, 1, "cpu")
    (agent,) = master.machine.agents()
    assert [slot.number for slot in agent.slots] == [0, 1]
    master.agent.machines = (Node("this-machine", 2, kind="cuda", gpus=("4", "GPU-a")),)
    gpus = [(slot.device_type, slot.name) for slot in master.machine.slots()]
    assert gpus == [("cuda", "GPU 4"), ("cuda", "GPU GPU-a")]


def test_a_disabled_slot_is_not_given_out(master: Sandbox) -> None:
    master.machine.set_slot_enabled(0, False)
    master.create(resources=WHOLE)
    assert master.runs() == []
    assert [slot.enabled for slot in master.machine.slots()] == [False, True]
    master.machine.set_slot_enabled(0, True)
    assert len(master.runs()) == 1
    with pytest.raises(NotFound):
        master.machine.set_slot_enabled(2, False)


@pytest.mark.parametrize("drain", [False, True])
def test_a_slot_that_is_disabled_ends_what_holds_it_unless_it_drains(master: Sandbox, drain: bool) -> None:
    master.create(max_restarts=0)
    held = master.run_of(1).allocation.id
    slot = master.machine.set_slot_enabled(1, False, drain=drain)
    assert (slot.draining, master.agent.killed) == (drain, [])
    slot = master.machine.set_slot_enabled(0, False, drain=drain)
    assert (slot.draining, slot.allocation_id) == (drain, held) and master.agent.killed == ([] if drain else [held])
    if drain:
        return
    master.exit(1, code=137)
    assert master.runs() == [] and (master.state_of(1), master.trials.get(1).restarts) == ("ACTIVE", 0)
    log = [line.message for line in master.trials.logs(1, LogQuery()) if line is not None]
    assert any("slot disabled" in line for line in log) and any("waits: the trial needs 1 slot" in line for line in log)
    master.machine.set_slot_enabled(1, True)
    assert master.run_of(1).allocation.run_id == 2


def test_an_agent_with_one_slot_ends_runs_without_slots_too(tmp_path: Path) -> None:
    master = Sandbox(tmp_path / "one", slots=1)
    master.create(resources={"slots_per_trial": 0})
    master.machine.set_slot_enabled(0, False)
    assert master.agent.killed == []
    master.machine.set_agent_enabled("this-machine", False)
    assert master.agent.killed == [master.run_of(1).allocation.id]
    master.close()


def test_an_agent_that_is_disabled_ends_and_starts_nothing(master: Sandbox) -> None:
    master.create()
    master.create(resources={"slots_per_trial": 0})
    agent = master.machine.set_agent_enabled("this-machine", False)
    assert (agent.enabled, agent.draining, len(master.agent.killed)) == (False, False, 2)
    for trial_id in (1, 2):
        master.exit(trial_id, code=137)
    master.create(resources={"slots_per_trial": 0})
    assert master.runs() == []
    assert master.machine.set_agent_enabled("this-machine", True).enabled and len(master.runs()) == 3
    agent = master.machine.set_agent_enabled("this-machine", False, drain=True)
    assert agent.draining and len(master.agent.killed) == 2


def test_a_job_that_waits_does_not_block_the_others_and_says_why(master: Sandbox) -> None:
    master.create()
    master.create(resources=WHOLE)
    master.create()
    assert {order.allocation.trial_id for order in master.runs()} == {1, 3}
    for _ in range(2):  # said once
        master.machine.set_slot_enabled(1, True)
    lines = [line.message for line in master.trials.logs(2, LogQuery()) if line is not None]
    assert len(lines) == 1 and "waits: the trial needs 2 slots" in lines[0]


def test_the_queue(master: Sandbox) -> None:
    for priority in (42, 42, 7):
        master.create(resources={**WHOLE, "priority": priority})
    jobs = master.machine.jobs()
    assert [master.machine.job(job.experiment_id) for job in jobs] == jobs
    states = [(job.experiment_id, job.state, job.jobs_ahead) for job in jobs]
    assert states == [(1, "SCHEDULED", 0), (3, "QUEUED", 0), (2, "QUEUED", 1)]
    assert (jobs[0].requested_slots, jobs[0].allocated_slots, jobs[1].allocated_slots) == (2, 2, 0)


def test_the_clusters_identity_outlives_a_restart(master: Sandbox) -> None:
    before = master.machine.info
    master.restart()
    assert master.machine.info == before and before.version == "0.38.1"
    assert master.machine.log_file == master.directory.log
