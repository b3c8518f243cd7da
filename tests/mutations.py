"""Small bugs, injected one at a time: the tests of a room must notice each.

    python -m tests.mutations            # all of them, about a minute each
    python -m tests.mutations 3 17       # those with these numbers
    python -m tests.mutations --list

A bug replaces one piece of text in a copy of the checkout; then ``pytest -x`` runs the tests that
are named with it. A bug whose text is no longer in its file is an error: adapt it to the code, do
not delete it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 600.0  # a bug that makes the tests hang counts as noticed


@dataclass(frozen=True)
class Bug:
    """``old`` in zero_trial/``file`` becomes ``new``; ``tests`` are paths below tests/."""

    file: str
    old: str
    new: str
    tests: str


BUGS: list[Bug] = [
    # -- sharding
    Bug(
        "sharding/layout.py",
        "offset = round_up(offset + slot.numel, ALIGN)",
        "offset = offset + slot.numel",
        "sharding",
    ),
    Bug(
        "sharding/layout.py", "limit / (norm + 1e-6)) if", "limit / (norm + 1e-3)) if", "sharding engine/test_engine.py"
    ),
    Bug(
        "sharding/layout.py",
        "return own if asked == torch.float32",
        "return asked if asked == torch.float32",
        "sharding",
    ),
    Bug(
        "sharding/plan.py",
        "2: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.USE,",
        "2: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.ALWAYS,",
        "sharding",
    ),
    Bug(
        "sharding/plan.py",
        "3: ZeroPlan(True, Lifetime.USE, Lifetime.USE, ReduceAt.MICRO)",
        "3: ZeroPlan(True, Lifetime.USE, Lifetime.USE, ReduceAt.BOUNDARY)",
        "sharding",
    ),
    Bug(
        "sharding/precision.py",
        "grad = param if accumulation_steps == 1 else torch.float32",
        "grad = param",
        "engine/test_precision.py sharding",
    ),
    Bug(
        "sharding/reduce.py",
        "late = [max(flags) for flags in zip(*rows, strict=True)]",
        "late = rows[0]",
        "sharding engine/test_uneven.py",
    ),
    Bug(
        "sharding/reduce.py",
        "if not grad_buffer.shard_filled:\n                self._launch(grad_buffer)",
        "if False:\n                self._launch(grad_buffer)",
        "sharding",
    ),
    Bug(  # a buffer is handed out before what it holds is written
        "sharding/offload/update_store.py",
        "self._ring.give(buffer, transfers)",
        "self._ring.give(buffer)",
        "sharding/test_offload_updates.py",
    ),
    Bug(  # a piece is read from another place than it is written to
        "sharding/offload/update_store.py",
        "offset += piece.low * dtype.itemsize",
        "offset += 0",
        "sharding/test_offload_updates.py",
    ),
    Bug(  # values are used before they have come
        "sharding/offload/homes.py",
        "self.wait_for_reads(part)  # which may be interrupted",
        "pass",
        "sharding/test_offload_homes.py",
    ),
    Bug(  # an update of parameters is not waited for before they are read
        "sharding/offload/homes.py",
        "        wait_for(self.written)\n",
        "",
        "sharding/test_offload_homes.py",
    ),
    # -- engine
    Bug("engine/step.py", "if edited:", "if False:", "engine/test_user_actions.py"),
    Bug(
        "engine/step.py",
        "model.wait_before_writing(copies=False)",
        "pass",
        "engine/test_shared_buffers.py engine/test_background_saving.py",
    ),
    Bug(
        "engine/step.py",
        "result.applied = finite or not self._config.skip_nonfinite",
        "result.applied = True",
        "engine/test_engine.py",
    ),
    Bug(
        "engine/step.py", "result.skipped += 1", "result.skipped += 0", "engine/test_engine.py engine/test_precision.py"
    ),
    Bug(
        "engine/step.py",
        "lr_scheduler.step(**arguments)",
        "pass",
        "engine/test_engine.py engine/test_optimizers.py",
    ),
    Bug("engine/step.py", "values[2:3] = self._weight", "values[2:3] = 1", "engine/test_weighted_losses.py"),
    # -- comm
    Bug(
        "ds_config/batch.py",
        "shard = data if plan_for_stage(zero.stage).shard_optimizer else 1",
        "shard = data",
        "ds_config",
    ),
    Bug(
        "comm/mesh.py",
        "for name, size in zip(reversed(AXES), reversed(self.sizes), strict=True):",
        "for name, size in zip(AXES, self.sizes, strict=True):",
        "comm",
    ),
    Bug(
        "ds_config/batch.py",
        "replica = data // shard if replica is None and shard else replica",
        "replica = 1 if replica is None and shard else replica",
        "ds_config",
    ),
    # -- checkpoint
    Bug("checkpoint/writer.py", "if found != record.bytes:", "if found is None:", "checkpoint"),
    Bug("checkpoint/writer.py", "os.fsync(file.fileno())", "pass", "checkpoint"),
    Bug(
        "checkpoint/writer.py",
        "write_manifest(folder, manifest, disk)\n        publish(folder, final, disk)",
        "publish(folder, final, disk)\n        write_manifest(final, manifest, disk)",
        "checkpoint",
    ),
    Bug("checkpoint/writer.py", "disk.remove_folder(folder)\n        raise", "raise", "checkpoint"),
    Bug("checkpoint/range_reader.py", "first = low - piece.start", "first = 0", "checkpoint"),
    Bug("checkpoint/range_reader.py", "if found != expected:", "if False:", "checkpoint"),
    # -- pipeline
    Bug(
        "pipeline/schedule.py",
        "if micro_batch >= rank:\n            yield",
        "if micro_batch > rank:\n            yield",
        "pipeline",
    ),
    Bug(
        "pipeline/schedule.py",
        "size, more = divmod(micro_batches, count)",
        "size, more = micro_batches // count, 0",
        "pipeline",
    ),
    Bug(
        "pipeline/lowering.py",
        "ReductionTiming.BOUNDARY and index in last:",
        "ReductionTiming.BOUNDARY and index not in last:",
        "pipeline",
    ),
    Bug("pipeline/lowering.py", "if len(holders) > 1:", "if len(holders) > 2:", "pipeline"),
    Bug("pipeline/executor.py", "factor = run.options.scale * share", "factor = run.options.scale", "pipeline"),
    Bug(
        "pipeline/executor.py",
        "for channel in self._out.values():\n            channel.fail(str(fault))",
        "for channel in ():\n            channel.fail(str(fault))",
        "pipeline engine/test_pipeline_data_and_faults.py",
    ),
    Bug("pipeline/layers.py", "best[begin] + weight * weight", "best[begin] + weight", "pipeline"),
    # -- ops
    Bug("ops/spec.py", "lr / (1 - beta1**step)", "lr / (1 - beta1**(step + 1))", "ops/test_library.py"),
    Bug("ops/plain.py", "return h & 0xFFFF, h >> 16", "return h & 0xFFFF, h & 0xFFFF", "ops/test_states.py"),
    Bug("ops/plain.py", "g if multiplier == 1.0 else g * multiplier", "g", "ops"),
    Bug(
        "ops/optimizers/fused.py",
        "key_of(part.seed, step)",
        "key_of(part.seed, 1)",
        "ops engine/test_torch_optimizer.py",
    ),
    Bug("csrc/include/zt_optimizers.h", "v = v > 3.402823466e38f ? v : next;", "v = next;", "ops"),
    # -- ds_config and schema
    Bug("ds_config/batch.py", "if batch != micro * steps * dp_world:", "if False:", "ds_config"),
    Bug(
        "ds_config/batch.py",
        "micro = max((batch or 1) // (dp_world * steps), 1)",
        "micro = max((batch or 1) // dp_world, 1)",
        "ds_config",
    ),
    Bug(
        "schema/types.py",
        "if not math.isfinite(number) or number != int(number):",
        "if not math.isfinite(number):",
        "schema ds_config",
    ),
    # -- life cycles and transactions of the master
    Bug(
        "master/core/lifecycle.py",
        "if life.state.stopping and _TRIAL_FORCE[life.state] >=",
        "if life.state.stopping and _TRIAL_FORCE[life.state] >",
        "master/core/test_lifecycle.py",
    ),
    Bug(
        "master/core/lifecycle.py",
        "if over.restarts > life.max_restarts:",
        "if over.restarts >= life.max_restarts:",
        "master/core/test_lifecycle.py",
    ),
    Bug(
        "master/core/lifecycle.py",
        "if life.killing or event.killed or (event.code == 0 and life.acked):",
        "if life.killing or event.killed:",
        "master/core/test_lifecycle.py",
    ),
    Bug(
        "master/core/lifecycle.py",
        "_PROGRESSED = (TrialState.PAUSED, TrialState.ERROR, TrialState.COMPLETED,",
        "_PROGRESSED = (TrialState.PAUSED, TrialState.COMPLETED, TrialState.ERROR,",
        "master/core",
    ),
    Bug(
        "master/core/transaction.py",
        "state.searches.pop(experiment_id, None)",
        "pass",
        "master/core",
    ),
    Bug(
        "master/core/transaction.py",
        "            metrics.archive_after(self.connection, trial_id, steps)",
        "            pass",
        "master/core master/store",
    ),
    Bug(
        "master/core/transaction.py", 'drop(self.connection, "tokens", "allocation_id", run.id)', "pass", "master/core"
    ),
    # -- leases and slots
    Bug(
        "master/agent/resources.py",
        "    except FileExistsError:\n        return False\n    finally:\n        draft",
        "    except FileExistsError:\n        return True\n    finally:\n        draft",
        "master/agent",
    ),
    Bug(
        "master/agent/resources.py",
        'return acquire_lease(folder, None) or "void" in',
        'return acquire_lease(folder, None) or "pid" in',
        "master/agent",
    ),
    Bug(
        "master/agent/resources.py",
        "key=len)\n    if len(having) < nodes:",
        "key=len, reverse=True)\n    if len(having) < nodes:",
        "master/agent",
    ),
    Bug("master/agent/resources.py", "if before is None or before.begins or not begins:", "if True:", "master/agent"),
    # -- users and tokens
    Bug(
        "master/core/accounts.py",
        "if owner is not None and (owner.user is None or owner.user.active):",
        "if owner is not None:",
        "master/core/test_accounts.py",
    ),
    Bug(
        "master/core/accounts.py",
        "if stored is None or not stored.active or stored.password != user.password:",
        "if stored is None:",
        "master/core/test_accounts.py",
    ),
    Bug(
        "master/core/accounts.py",
        'DELETE FROM tokens WHERE user_id = ? AND digest != ?"',
        'DELETE FROM tokens WHERE user_id = ? AND digest = ?"',
        "master/core/test_accounts.py master/http/test_account_routes.py",
    ),
    Bug(
        "master/core/accounts.py",
        "if name not in own or own[name] != value:",
        "if name in own and own[name] != value:",
        "master/core",
    ),
    Bug("master/core/accounts.py", "if user.name != owner and not user.admin:", "if False:", "master/core master/http"),
    Bug(
        "master/core/accounts.py",
        "if not sender.admin and (not own or not",
        "if not sender.admin and (not",
        "master/http/test_account_routes.py master/core/test_accounts.py",
    ),
    Bug("master/http/app.py", "refusal = refuse_foreign(head, self._hosts)", "refusal = None", "master/http"),
    Bug("master/http/app.py", "principal.allocation is not None and level is AuthLevel.USER:", "False:", "master/http"),
    Bug("master/http/app.py", "        require_own(principal.allocation, **asked)", "        pass", "master/http"),
    Bug("master/http/app.py", "        if unknown:  # a part", "        if False:  # a part", "master/http"),
    # -- metrics and checkpoints
    Bug("master/store/metric_rows.py", 'entry["sum"] += number', 'entry["sum"] = number', "master/store"),
    Bug(
        "master/store/metric_rows.py",
        "AND (steps > ? OR (steps = ? AND grp = ?))",
        "AND (steps >= ? OR (steps = ? AND grp = ?))",
        "master/store master/core",
    ),
    Bug(
        "master/core/checkpoints.py",
        "            if stored.state is CheckpointState.COMPLETED:",
        "            if True:",
        "master/core",
    ),
    # -- searchers and configurations
    Bug(
        "master/search/searcher.py",
        "self._grid.point(self.size - len(self.states) - 1)",
        "self._grid.point(len(self.states))",
        "master/search",
    ),
    Bug("master/search/searcher.py", "return 1.0 if self.over else min(max(", "return min(max(", "master/search"),
    Bug("master/search/searcher.py", "rank = bisect.bisect_left([", "rank = bisect.bisect_right([", "master/search"),
    Bug(
        "master/search/searcher.py",
        "shares[0] += max(max_trials - sum(shares), 0)",
        "shares[-1] += max(max_trials - sum(shares), 0)",
        "master/search",
    ),
    Bug("experiment/rules.py", "        return below + above\n", "        return above + below\n", "experiment"),
    Bug("experiment/rules.py", 'if not top and ("type" in above or "type" in below):', "if False:", "experiment"),
    # -- readers of reports
    Bug(
        "report/report_data.py",
        "end = bisect_right(self._steps, step)",
        "end = bisect_left(self._steps, step)",
        "report",
    ),
    Bug(
        "report/report_data.py",
        "order = [last[step] for step in sorted(last)]",
        "order = [last[step] for step in last]",
        "report",
    ),
    Bug(
        "report/master_reader.py",
        '"th" if number % 100 in (11, 12, 13) else',
        '"th" if number in (11, 12, 13) else',
        "report",
    ),
    Bug("report/run_reader.py", 'one.rewind(event["step"])', "pass", "report"),
]


def copy_of_checkout(folder: Path) -> Path:
    """Copy what tests need; results and environments stay behind."""
    apart = {ROOT / name for name in (".git", ".venv", "build", "runs", "site", "benchmarks/results")}

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name.endswith(("__pycache__", "_cache")) or Path(folder, name) in apart]

    return Path(shutil.copytree(ROOT, folder / "checkout", ignore=ignored, symlinks=True))


def notices(bug: Bug, checkout: Path) -> bool:
    """Return whether the tests fail with the bug. Raises ValueError unless its text is in the file
    once."""
    path = checkout / "zero_trial" / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise ValueError(f"zero_trial/{bug.file} has {text.count(bug.old)} times: {bug.old}")
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not extended", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *(f"tests/{each}" for each in bug.tests.split())],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the tests of {bug.file} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def results(numbers: list[int], checkout: Path) -> Iterator[bool]:
    """Yield for each bug whether it was noticed, and print a line for it."""
    for number in numbers:
        bug, began = BUGS[number], time.monotonic()
        found = notices(bug, checkout)
        took = time.monotonic() - began
        first, second = (" ".join(text.split()) for text in (bug.old, bug.new))
        print(
            f"{number:3} {'noticed' if found else 'MISSED '} {took:5.0f} s  {bug.file}: {first} -> {second}", flush=True
        )
        yield found


def main() -> int:
    """Inject the bugs, and return 1 if the tests miss one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="which bugs (default: all)")
    parser.add_argument("--list", action="store_true", help="print the bugs and inject none")
    given = parser.parse_args()
    numbers = given.numbers or list(range(len(BUGS)))
    if given.list:
        for number in numbers:
            print(number, BUGS[number])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = list(results(numbers, copy_of_checkout(Path(folder))))
    print(f"{sum(found)} of {len(found)} noticed")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
