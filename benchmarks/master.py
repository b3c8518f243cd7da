"""The embedded master's speed, with Determined's ``det`` and Determined's harness: up, first step,
metric reports, followed logs.

    python benchmarks/master.py --rounds 3
    python benchmarks/master.py --rounds 1 --count 50     # quick

Needs the extra ``determined``. Every number is measured through HTTP on a separate master in a
temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import Column, number, save

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parent.parent

CONFIG: dict[str, Any] = {
    "name": "benchmark",
    "resources": {"slots_per_trial": 1},
    "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
    "hyperparameters": {},
    "max_restarts": 0,
}

FIRST_STEP = """
import time
from determined import core
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    context.train.report_training_metrics(steps_completed=1, metrics={"loss": 1.0})
    print("STEP", time.time(), flush=True)
    context.train.report_validation_metrics(steps_completed=1, metrics={"validation_loss": 1.0})
"""

# The harness sends reports from a thread of its own; leaving the block waits until all have been
# sent.
UPSTREAM = """
import time
from determined import core
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    begin = time.perf_counter()
    for step in range(1, COUNT + 1):
        context.train.report_training_metrics(steps_completed=step, metrics={"loss": 1.0 / step, "lr": 0.001, "norm": 2.0})
print("RATE", COUNT / (time.perf_counter() - begin), flush=True)
"""

# One kept connection per thread, a request after every answer.
RAW = """
import http.client, json, os, threading, time, urllib.parse
import determined
info = determined.get_cluster_info()
url = urllib.parse.urlparse(os.environ["DET_MASTER"])
trial, run = info.trial.trial_id, info.trial._trial_run_id
headers = {"Grpc-Metadata-x-allocation-token": "Bearer " + os.environ["DET_SESSION_TOKEN"]}

def send(first, count):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    for step in range(first, first + count):
        report = {"trialId": trial, "trialRunId": run, "stepsCompleted": step, "metrics": {"avgMetrics": {"loss": 0.5, "lr": 0.001, "norm": 2.0}}}
        connection.request("POST", f"/api/v1/trials/{trial}/metrics", json.dumps({"group": "training", "metrics": report}), headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status

threads = [threading.Thread(target=send, args=(n * COUNT // THREADS + 1, COUNT // THREADS)) for n in range(THREADS)]
begin = time.perf_counter()
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("RATE", COUNT / (time.perf_counter() - begin), flush=True)
"""

LINES = """
import time
for _ in range(20):
    print("WRITTEN", time.time(), flush=True)
    time.sleep(0.25)
"""


class Bench:
    """A master, and Determined's ``det`` with its address and token."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self.env: Mapping[str, str] = {}

    def up(self) -> float:
        """Start the master; return the seconds until its command returned."""
        begin = time.perf_counter()
        words = [
            "zero-trial",
            "master",
            "up",
            "--root",
            str(self.folder / "root"),
            "--slots",
            str(self.slots),
            "--cpu",
            "--json",
        ]
        done = subprocess.run([str(BIN / words[0]), *words[1:]], capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - begin
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
        mine = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}
        self.env = {**kept, **mine, **json.loads(done.stdout)["env"]}
        return seconds

    def down(self) -> None:
        subprocess.run(
            [str(BIN / "zero-trial"), "master", "down", "--root", str(self.folder / "root")],
            capture_output=True,
            check=True,
        )

    def det(self, *words: str) -> str:
        done = subprocess.run(
            [str(BIN / "det"), *words], env=dict(self.env), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"det {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def create(self, script: str, **numbers: int) -> tuple[int, float]:
        """Submit a script; return the trial's number, and when the command began."""
        context = self.folder / "context"
        context.mkdir(exist_ok=True)
        for name, value in numbers.items():
            script = script.replace(name, str(value))
        (context / "train.py").write_text(script)
        file = self.folder / "config.yaml"
        file.write_text(json.dumps({**CONFIG, "entrypoint": "python3 train.py"}))
        return self.submit(file, context)

    def submit(self, file: Path, context: Path, *options: str) -> tuple[int, float]:
        """Return the number of the first trial, and when the command began."""
        begin = time.time()
        said = self.det("experiment", "create", str(file), str(context), *options)
        experiment = said.rpartition("Created experiment ")[2].split()[0]
        while not (trials := self.det("experiment", "list-trials", experiment, "--csv").splitlines()[1:]):
            time.sleep(0.1)
        return int(trials[0].split(",")[0]), begin

    def said(self, trial: int, word: str) -> float:
        """Return the number that a trial printed after a word, once it has ended."""
        for line in self.det("trial", "logs", "-f", str(trial)).splitlines():
            if f"|| {word} " in line:
                return float(line.split()[-1])
        raise SystemExit(f"trial {trial} never said {word}: {self.det('trial', 'logs', str(trial))}")

    def first_report(self, trial: int) -> float:
        """Return when the first training metrics of a trial were reported; then end the trial."""
        while True:
            found = json.loads(self.det("trial", "describe", str(trial), "--json"))
            if found["trial"]["state"] in ("STATE_ERROR", "STATE_CANCELED"):
                sys.exit(self.det("trial", "logs", str(trial)))
            times = [each["training"]["endTime"] for each in found["workloads"] if each.get("training")]
            if times:
                self.det("experiment", "kill", str(found["trial"]["experimentId"]))
                return min(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() for text in times)
            time.sleep(1)

    def delays(self) -> list[float]:
        """Return the seconds from a trial writing a line until ``det trial logs -f`` prints
        it."""
        trial, _ = self.create(LINES)
        words = [sys.executable, "-u", str(BIN / "det"), "trial", "logs", "-f", str(trial)]
        found = []
        with subprocess.Popen(words, env=dict(self.env), stdout=subprocess.PIPE, text=True) as follow:
            for line in follow.stdout or ():
                if "|| WRITTEN " in line:
                    found.append(time.time() - float(line.split()[-1]))
        return found


def measure(bench: Bench, rounds: int, count: int) -> list[dict[str, Any]]:
    """Return one row per measurement: the median and the worst over rounds."""
    rows = []

    def row(what: str, unit: str, values: list[float], *, high_is_good: bool = False) -> None:
        worst = min(values) if high_is_good else max(values)
        rows.append({"what": what, "unit": unit, "median": statistics.median(values), "worst": worst, "values": values})
        print(f"{what}: {statistics.median(values):.3g} {unit}", flush=True)

    ups = []
    for _ in range(rounds):
        ups.append(bench.up())
        bench.down()
    row("zero-trial master up, until it serves", "s", ups)
    bench.up()
    firsts = []
    for _ in range(rounds):
        trial, begin = bench.create(FIRST_STEP)
        firsts.append(bench.said(trial, "STEP") - begin)
    row("det experiment create to the first report, a script without torch", "s", firsts)
    quick = ROOT / "experiments" / "quickstart" / "const.yaml"
    firsts = []
    for _ in range(rounds):
        # The quickstart reports every hundred steps; here it reports the first one.
        trial, begin = bench.submit(quick, ROOT / "model_defs" / "gpt", "--config", "scheduling_unit=1")
        firsts.append(bench.first_report(trial) - begin)
    row("det experiment create to the first training step, quickstart on two ranks", "s", firsts)
    rates = [bench.said(bench.create(UPSTREAM, COUNT=count)[0], "RATE") for _ in range(rounds)]
    row("metric reports of Determined's harness, one trial", "1/s", rates, high_is_good=True)
    for threads in (1, 4):
        rates = [bench.said(bench.create(RAW, COUNT=count * 4, THREADS=threads)[0], "RATE") for _ in range(rounds)]
        row(f"metric reports over {threads} kept connection{'s' * (threads > 1)}", "1/s", rates, high_is_good=True)
    row("a written line until det trial logs -f prints it", "s", bench.delays())
    return rows


def main() -> None:
    """Measure, and save the table in results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=2000, help="metric reports per round")
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    settings = {**vars(options), "load": f"{os.getloadavg()[0]:.1f} before the start"}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.slots)
        try:
            rows = measure(bench, options.rounds, options.count)
        finally:
            bench.down()
    note = "The embedded master, asked by Determined's det and Determined's harness. Worst: of the rounds, or of the lines."
    columns: list[Column] = [("what", lambda row: str(row["what"])), ("unit", lambda row: str(row["unit"]))]
    columns += [("median", number("median", 2)), ("worst", number("worst", 2))]
    save("master", settings, rows, columns, note)


if __name__ == "__main__":
    main()
