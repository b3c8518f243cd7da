"""Where ranks meet: from the command line, and from SLURM's variables."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import RendezvousSpec, from_slurm

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}


@pytest.mark.parametrize(
    ("spec", "single", "leads", "host"),
    [
        (RendezvousSpec(), True, True, ""),
        (RendezvousSpec("2", 1, "10.0.0.1", 7000), False, False, "10.0.0.1"),
        (RendezvousSpec("1:4", endpoint="head:9000", run_id="x"), False, True, "head"),
    ],
)
def test_one_host_or_several(spec: RendezvousSpec, single: bool, leads: bool, host: str):
    assert (spec.single, spec.leads, spec.meeting_host) == (single, leads, host)


def test_slurm():
    assert from_slurm(SLURM, 29500) == RendezvousSpec("3", 1, "gpu07", 29500, run_id="17")
    step = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    # the step, not the whole job
    assert from_slurm(step, 29500) == RendezvousSpec("2", 1, "gpu08", 29500, run_id="17")
    assert from_slurm({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}) == RendezvousSpec("3", 1, "x", 7, run_id="17")


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "17"}, {**SLURM, "SLURM_NNODES": "1"}])
def test_no_slurm_or_one_host(env: dict[str, str]):
    assert from_slurm(env) is None


def test_slurm_with_a_task_per_rank_is_refused():
    with pytest.raises(ConfigError, match=r"several tasks per host.* got 24, expected 3 .*--ntasks-per-node=1"):
        from_slurm({**SLURM, "SLURM_NTASKS": "24"})
