"""One node of an allocation: completes the master's order with values that only the node knows (its
address, free ports, devices, a temporary directory), performs the rendezvous with the other nodes,
and supervises the trial's processes.

The node runs ``python -m zero_trial.master.agent.node FOLDER RANK NAME``. FOLDER is the
allocation's folder in the master's directory. Do not rename this module: a running master starts it
by name even after an upgrade.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from zero_trial.errors import MasterError, ZeroTrialError
from zero_trial.master import logs, shepherd
from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.environment import HeldPorts, of_user
from zero_trial.master.agent.resources import Exit
from zero_trial.util.memory import usable_cores

_MEET_SECONDS = 600.0
_PEER_FILE = "run/determined/info/rendezvous.json"  # where the harness reads the addresses of its peers


def own_address(master_url: str) -> str:
    """Return this machine's address on the route to the master; sends no packets."""
    parts = urlsplit(master_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def completed(
    order: Mapping[str, Any], mine: Path, name: str, ports: Mapping[str, str], visible: str, threads: int, scratch: str
) -> dict[str, str]:
    """Return the environment of the trial's processes on this node. OMP_NUM_THREADS and TMPDIR from
    the experiment's environment_variables take precedence.

    Args:
        mine: the folder of this node.
        ports: port variables of the first node.
        visible: CUDA_VISIBLE_DEVICES as set by the engine.
        threads: threads per slot of this node.
        scratch: its temporary directory.
    """
    env = dict(order["env"])
    chosen = of_user(json.loads(env["DET_EXPERIMENT_CONFIG"]), order["kind"])
    for variable, value in (("TMPDIR", scratch), ("OMP_NUM_THREADS", str(threads))):
        env[variable] = chosen.get(variable, value)
    env.update(
        DET_AGENT_ID=name,
        DET_SLOT_IDS=json.dumps(order["slot_ids"]),
        DET_RUN_ROOT=str(mine / "root"),
        CUDA_VISIBLE_DEVICES=visible if order["kind"] == "cuda" else "",
        **ports,
    )
    if order["nodes"] > 1:
        # several nodes on one machine, as in tests, would otherwise share the launcher's socket
        env["DET_SOCKET_ROOT"] = scratch
    return env


def threads_of(order: Mapping[str, Any], cores: int, asked: str) -> int:
    """Return the number of threads per slot of this node.

    Args:
        order: ``threads``: the CPUs per slot as known to the master, or 0.
        cores: the number of this machine's cores that this process may use.
        asked: the job's CPUs on this node according to the engine (SLURM_CPUS_PER_TASK), or "".
    """
    slots = max(1, int(order["slots"]))
    own = cores // slots
    known = int(asked) // slots if asked else int(order["threads"])
    return max(1, min(known or own, own))


def is_refused(error: Exception) -> bool:
    """Return whether repeating a request that failed with ``error`` would fail again: the master
    rejected it with a 4xx other than 408 (timeout), 409 (too early) and 429 (too many requests)."""
    return isinstance(error, HTTPError) and 400 <= error.code < 500 and error.code not in (408, 409, 429)


def code_of(ended: Exit | None, nodes: int) -> int:
    """Return this process's exit code. With several nodes, 0 means that the exit is recorded; any
    other code tells the engine not to let the other nodes wait for this one."""
    if ended is None:
        return 1
    return 0 if nodes > 1 else ended.code


def meet(env: Mapping[str, str], rank: int, peers: int, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the data that each node of the allocation sent, by rank, once all have arrived.

    The master gathers the data. Requests bypass any proxy, which would see the token. Raises
    MasterError after ten minutes, or immediately if the master rejects the request.
    """
    url = f"{env['DET_MASTER']}/api/v1/allocations/{env['DET_ALLOCATION_ID']}/all_gather"
    body = {"requestUuid": str(uuid.uuid4()), "numPeers": peers, "data": {**mine, "rank": rank}}
    headers = {
        "grpc-metadata-x-allocation-token": f"Bearer {env['DET_SESSION_TOKEN']}",
        "Content-Type": "application/json",
    }
    opener = build_opener(ProxyHandler({}))
    until = time.monotonic() + _MEET_SECONDS
    while True:
        try:
            with opener.open(Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
                return sorted(json.load(answer)["data"], key=lambda peer: int(peer["rank"]))
        except (URLError, OSError) as error:
            refused = is_refused(error)
            if refused or time.monotonic() > until:
                what = (
                    "the master rejected this node's rendezvous with the others"
                    if refused
                    else "the other nodes of the allocation did not arrive"
                )
                raise MasterError(what, where=url, got=str(error)) from error
            time.sleep(1.0)


def order_in(folder: Path, name: str) -> dict[str, Any]:
    """Read the master's order. Raises MasterError if this node does not see the file that the
    master wrote, or sees a different checkpoint storage."""
    fix = "Mount the storage of --root and of checkpoint_storage on all nodes, at the same path."
    try:
        order: dict[str, Any] = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MasterError(
            "the master's folder is not shared with this node", where=name, got=str(error), fix=fix
        ) from error
    kept = order.get("storage")
    if kept is None:
        return order
    found = storage.name_of(place := Path(kept["path"]))
    if found != kept["name"]:
        storage.refresh_listing(place)
        found = storage.name_of(place)
    if found != kept["name"]:
        raise MasterError(
            "the folder for checkpoints is not shared with this node",
            where=f"checkpoint_storage on {name}",
            got=f"{kept['path']} is {'a different folder here' if found else 'missing, or without the name of the storage'}",
            fix=fix,
        )
    return order


def main(folder: Path, rank: int, name: str) -> int:
    """Run this node's part of the allocation until it ends and return the exit code."""
    order = order_in(folder, name)
    mine = folder / f"node-{rank}"
    work = mine / "work"
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = str(storage.make_scratch(mine, os.environ))
    Path(scratch, "tmp").mkdir(exist_ok=True)
    held = HeldPorts()  # until this process ends
    ports: Mapping[str, str] = held.variables
    threads = threads_of(order, usable_cores(), os.environ.get("SLURM_CPUS_PER_TASK", ""))
    if order["nodes"] > 1:
        address = own_address(order["env"]["DET_MASTER"])
        me = {"address": address, "slots": order["slots"], "ports": ports}
        peers = meet(order["env"], rank, order["nodes"], me)
        ports = peers[0]["ports"]
        info = {
            "container_addrs": [peer["address"] for peer in peers],
            "container_rank": rank,
            "container_slot_counts": [peer["slots"] for peer in peers],
        }
        (mine / "root" / _PEER_FILE).write_text(json.dumps(info), encoding="utf-8")
    run = {
        "command": order["command"],
        "cwd": str(work),
        "env": completed(order, mine, name, ports, os.environ.get("CUDA_VISIBLE_DEVICES", ""), threads, scratch),
        "log": str(logs.path_of(Path(order["logs"]), order["run_id"], rank)),
        "grace": order["grace"],
        "policies": order["policies"],
    }
    shepherd.main(mine, json.dumps(run))
    held.close()
    storage.remove_scratch(mine, order["env"]["DET_ALLOCATION_ID"])
    return code_of(resources.exit_of(mine), order["nodes"])


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
    except (OSError, ZeroTrialError) as error:
        sys.exit(f"error   {error}")  # the master copies this line to the log of the trial
