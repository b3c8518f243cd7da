"""The environment that ranks are started with: what the user has set stands, the rest is filled in. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def rank_environment(env: Mapping[str, str], *, threads: int, interface: str | None) -> dict[str, str]:
    """``env`` with what ranks need: their share of threads, the interface for gloo, unbuffered output, no noise of torch.distributed.run.

    Variables that would place this process as a rank of an outer run are dropped: the agent sets its own.
    """
    inherited = {name: value for name, value in env.items() if name not in _OUTER_RUN}
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if interface:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    return {**defaults, **inherited}


_OUTER_RUN = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *(
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        ),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    ]
)
