"""What the agent is told to run: one allocation with all that its environment is made of."""

from __future__ import annotations

from dataclasses import dataclass

from zero_trial.master.records import Allocation, Json


@dataclass(frozen=True)
class StartOrder:
    """One allocation to start. ``token`` is in the clear: it goes into the environment of the trial and nowhere else."""

    allocation: Allocation
    config: Json
    hparams: Json
    seed: int
    steps_completed: int
    latest_checkpoint: str | None
    owner: str
    token: str
    master_url: str
    cluster_id: str
    agent_id: str
    visible_devices: str = ""  # CUDA_VISIBLE_DEVICES
    threads: int = 1  # OMP_NUM_THREADS
    has_hook: bool = False  # the context directory has a startup-hook.sh
