"""Determined's ``det`` against a master of its own: create, look, steer, change, download,
delete."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.master.det import BIN, SECONDS, TRAIN, Det, running, until
from zero_trial.util.process_tree import marked


@pytest.fixture(scope="module")
def det(tmp_path_factory: pytest.TempPathFactory, master_options: tuple[str, ...]) -> Iterator[Det]:
    with running(tmp_path_factory.mktemp("master"), *master_options) as made:
        yield made


@pytest.fixture(scope="module")
def ended(det: Det) -> int:
    """An experiment of one trial that has run to its end, submitted and followed with the program
    itself."""
    (det.context() / "sub").mkdir(exist_ok=True)
    (det.context() / "sub" / "data.txt").write_text("data")
    extra = det.folder / "extra"
    extra.mkdir()
    (extra / "more.txt").write_text("more")
    hparams = {"steps": 4, "deep": {"lr": 0.1}}
    file = det.write(name="first", description="of many", labels=["a"], hyperparameters=hparams)
    options = ("--include", str(extra), "--config", "max_restarts=1")
    result = det.program("experiment", "create", "-f", str(file), str(det.context()), *options)
    assert result.code == 0, result.text
    number = int(result.out.rpartition("Created experiment ")[2].split()[0])
    assert "Following first trial" in result.out and "starts after step 0" in result.out
    assert "step 4" in result.out, "the last lines of a trial are followed too"
    assert det.wait(number) == "COMPLETED"
    return number


def test_no_password_is_asked_for_and_a_wrong_one_is_named(det: Det) -> None:
    who = "You are logged in as user 'determined'\n"
    assert det.program("user", "whoami").out == who
    assert "DET_USER_TOKEN" in det.exports
    private = [path for path in det.root.iterdir() if path.name in ("user.json", "master.db", "master.json")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (det.root, *private)] == [0o700, *[0o600] * 3]
    account = json.loads((det.root / "user.json").read_text())
    without = {name: value for name, value in det.exports.items() if name != "DET_USER_TOKEN"}
    assert replace(det, exports={**without, "DET_PASS": account["password"]}).run("user", "whoami").out == who
    (det.folder / "home" / "auth.json").unlink()
    bad = replace(det, exports={**without, "DET_PASS": "Wrong1word"}).run("user", "whoami")
    assert bad.code == 1 and "Forbidden(invalid credentials)" in bad.err and "Traceback" not in bad.err


def test_an_ended_experiment_is_described_as_it_was_submitted_and_its_files_come_back(det: Det, ended: int) -> None:
    found = det.experiment(ended)
    assert [found[key] for key in ("name", "description", "labels", "state", "progress")] == [
        *("first", "of many", ["a"], "STATE_COMPLETED", 1.0)
    ]
    assert "max_restarts: 1" in det.ok("experiment", "config", str(ended))
    for words in (("list",), ("describe", str(ended)), ("list", "--csv")):
        text = det.ok("experiment", *words)
        assert "first" in text and "COMPLETED" in text
    (trial,) = det.trials(ended)
    assert [trial[key] for key in ("state", "totalBatchesProcessed", "hparams")] == [
        *("STATE_COMPLETED", 4, {"steps": 4, "deep": {"lr": 0.1}})
    ]
    number = str(trial["id"])
    work = det.json("trial", "describe", number, "--metrics")["workloads"]
    trained = [each["training"]["metrics"]["avgMetrics"]["loss"] for each in work if each.get("training")]
    assert trained == [1.0, 0.5, 1 / 3, 0.25]
    assert [each["validation"]["totalBatches"] for each in work if each.get("validation")] == [1, 2, 3, 4]
    assert sum(1 for each in work if each.get("checkpoint")) == 1
    assert "Validation Metric: validation_loss" in det.ok("experiment", "describe", str(ended), "--metrics")
    bundle = det.ok("trial", "support-bundle", number, "-o", str(det.folder))
    with tarfile.open(bundle.split()[-1]) as archive:
        assert len(archive.getnames()) == 4
    lines = [line for line in det.logs(trial["id"]).splitlines() if line.startswith("[20")]
    assert "\n".join(lines[-2:]) in det.ok("trial", "logs", number, "--tail", "2")
    assert "\n".join(lines[:2]) in det.ok("trial", "logs", number, "--head", "2")
    assert '"log": "step 1"' in det.ok("trial", "logs", number, "--json")
    assert "step 4" in det.ok("task", "logs", det.json("trial", "describe", number)["trial"]["taskId"])
    uuid = det.ok("experiment", "list-checkpoints", str(ended), "--csv").splitlines()[1].split(",")[4]
    assert uuid in det.ok("experiment", "list-checkpoints", str(ended), "--best", "1")
    assert '"steps_completed": 4' in det.ok("checkpoint", "describe", uuid)
    direct, proxied, best = (det.folder / name for name in ("direct", "proxied", "best"))
    det.ok("checkpoint", "download", uuid, "-o", str(direct))
    det.ok("checkpoint", "download", uuid, "-o", str(proxied), "--mode", "master")
    det.ok("experiment", "download", str(ended), "-o", str(best))
    for folder in (direct, proxied, best / uuid):
        assert json.loads((folder / "state.json").read_text()) == {"step": 4}
    det.ok("experiment", "download-model-def", str(ended), "--output-dir", str(det.folder))
    with tarfile.open(det.folder / f"experiment_{ended}_model_def.tgz") as archive:
        assert archive.extractfile("train.py").read().decode() == TRAIN  # type: ignore[union-attr]
        assert {"sub", "sub/data.txt", "extra", "extra/more.txt"} <= set(archive.getnames())
    before = det.ok("experiment", "list", "--all")
    for changes, word in (({"resources": {"slots_per_trial": 400}}, "400"), ({"unheard_of": 1}, "unheard_of")):
        refused = det.run("experiment", "create", str(det.write(**changes)), str(det.context()))
        assert refused.code == 1 and word in refused.err and "Traceback" not in refused.err
    assert det.ok("experiment", "list", "--all") == before


def test_the_machine(det: Det, ended: int) -> None:
    det.idle()
    agents = det.json("agent", "list")
    assert sum(agent["num_slots"] for agent in agents) == 4
    assert {(agent["enabled"], agent["version"]) for agent in agents} == {(True, "0.38.1")}
    slots = det.json("slot", "list")
    assert [(slot["slot_id"], slot["type"], slot["allocation_id"]) for slot in slots] == [
        (str(n), "cpu", "FREE") for n in range(4)
    ]
    assert det.json("job", "list") == {"jobs": []}
    assert "serves" in det.ok("master", "logs", "--tail", "1000")
    last = slots[-1]["agent_id"]
    det.ok("slot", "disable", last, "3")
    assert [slot["enabled"] for slot in det.json("slot", "list")] == [True, True, True, False]
    det.ok("slot", "enable", last, "3")


def test_an_experiment_is_paused_and_goes_on_where_it_stopped(det: Det) -> None:
    storage = {"type": "shared_fs", "host_path": str(det.folder), "save_trial_latest": 2}
    number = det.create(
        "--paused", hyperparameters={"steps": 20, "pause": 0.1}, name="patient", checkpoint_storage=storage
    )
    assert det.state(number) == "PAUSED"
    for words in (("max-slots", "2"), ("weight", "2.5"), ("priority", "7")):
        det.ok("experiment", "set", words[0], str(number), words[1])
    resources = det.experiment(number)["config"]["resources"]
    assert (resources["max_slots"], resources["weight"], resources["priority"]) == (2, 2.5, 7)
    det.idle()
    det.ok("experiment", "activate", str(number))
    until(lambda: bool(det.trials(number)), "the trial is never made")
    trial = det.trials(number)[0]["id"]
    det.wait_for_line(trial, "step 3")
    (job,) = det.json("job", "list")["jobs"]
    assert (job["name"], job["priority"], job["allocatedSlots"]) == ("patient", 7, 1)
    det.ok("job", "update", job["jobId"], "--priority", "5")
    assert det.json("job", "list")["jobs"][0]["priority"] == 5
    (summary,) = det.json("task", "list").values()
    assert summary["slotsNeeded"] == 1
    assert sum(slot["task_name"] != "FREE" for slot in det.json("slot", "list")) == 1
    det.ok("experiment", "pause", str(number))
    det.idle()
    assert det.state(number) == "PAUSED"
    stopped = det.trials(number)[0]["totalBatchesProcessed"]
    assert 3 <= stopped < 20
    det.ok("experiment", "activate", str(number))
    assert det.run("experiment", "wait", str(number), "--polling-interval", "1").code == 0
    assert f"starts after step {stopped}" in det.logs(trial)
    steps = [
        each["training"]["totalBatches"]
        for each in det.json("trial", "describe", str(trial))["workloads"]
        if each.get("training")
    ]
    assert steps == list(range(1, 21)), "every step once, none lost and none twice"
    det.ok("trial", "download", str(trial), "--latest", "-o", str(det.folder / "latest"))
    assert (det.folder / "latest" / "state.json").exists()


def test_kill_cancel_and_their_exit_codes(det: Det) -> None:
    slow = {"hyperparameters": {"steps": 1000, "pause": 0.1}}
    killed, canceled, of_trial = (det.create(**slow) for _ in range(3))
    until(lambda: all(det.trials(number) for number in (killed, canceled, of_trial)), "the trials are never made")
    follow = subprocess.Popen(
        [str(BIN / "det"), "trial", "logs", "-f", str(det.trials(killed)[0]["id"])],
        env=det.env(),
        stdout=subprocess.PIPE,
        # It is ignored by what a script starts in the background, these tests for one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert follow.stdout is not None and follow.stdout.readline()
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=SECONDS)
    assert follow.returncode == 3 and det.state(killed) in ("STARTING", "RUNNING"), (
        "Ctrl-C ends what follows, not the trial"
    )
    det.wait_for_line(det.trials(canceled)[0]["id"], "step 1")
    det.ok("experiment", "kill", str(killed))
    det.ok("experiment", "cancel", str(canceled))
    det.ok("trial", "kill", str(det.trials(of_trial)[0]["id"]))
    assert det.wait(killed) == "CANCELED"
    assert det.wait(canceled) == "CANCELED"
    det.wait(of_trial)
    assert [trial["state"] for trial in det.trials(of_trial)] == ["STATE_CANCELED"]
    assert det.run("experiment", "wait", str(killed), "--polling-interval", "1").code == 1
    assert '"steps_completed"' in det.ok("trial", "describe", str(det.trials(canceled)[0]["id"])), (
        "a canceled trial saves before it ends"
    )
    paused = det.create("--paused")
    det.ok("experiment", "cancel", str(paused))
    assert det.wait(paused) == "CANCELED"


def test_a_log_policy_and_a_disabled_agent_end_runs_as_on_a_cluster(det: Det) -> None:
    policies = [{"name": "seven", "pattern": "crashes on (purpose)", "action": "cancel_retries"}]
    number = det.create(log_policies=policies, max_restarts=3, hyperparameters={"steps": 3, "crash": True})
    slow = det.create(hyperparameters={"steps": 1000, "pause": 0.1})
    assert det.wait(number) == "ERROR"
    (trial,) = det.trials(number)
    assert (trial["restarts"], trial["logPolicyMatched"]) == (0, "seven")
    log = det.logs(trial["id"])
    assert "crashes on (purpose)" in log and "matched logs to a don't retry policy" in log
    agents = [agent["id"] for agent in det.json("agent", "list")]
    (trial,) = det.trials(slow)
    det.wait_for_line(trial["id"], "step 1")
    for agent in agents:
        det.ok("agent", "disable", agent)
    det.wait(slow, "QUEUED")
    for agent in agents:
        det.ok("agent", "enable", agent)
    det.wait(slow, "RUNNING")
    assert "agent disabled" in det.logs(trial["id"])
    det.ok("experiment", "kill", str(slow))
    det.wait(slow)


# Says what its startup hook, the experiment and the master's environment have left in its own, and
# leaves a process of another session behind.
DAEMON = """
import os, subprocess, determined
from determined import core

print("hook", os.environ.get("FROM_HOOK"), "user", os.environ.get("FROM_CONFIG"), "leak", os.environ.get("OF_THE_MASTER"))
print("paths", determined._info.DEFAULT_CLUSTER_INFO_PATH, os.path.exists("/run/determined/info"), flush=True)
subprocess.Popen(["setsid", "sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with core.init(distributed=None, tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
        (path / "state").write_text("1")
    context.train.report_validation_metrics(1, {"validation_loss": 0.5, "batches": 1})
"""


@pytest.mark.smoke
def test_a_hook_a_storage_of_its_own_and_a_daemon_which_does_not_outlive_the_trial(det: Det) -> None:
    hook, saved = det.folder / "startup-hook.sh", det.folder / "deep" / "saved"
    hook.write_text("export FROM_HOOK=hooked\n")
    number = det.create(
        "--include",
        str(hook),
        entrypoint=["python3", "-c", DAEMON],
        environment={"environment_variables": ["FROM_CONFIG=configured"]},
        checkpoint_storage={"type": "directory", "container_path": str(saved)},
    )
    state, (trial,) = det.wait(number), det.trials(number)
    log = det.logs(trial["id"])
    assert state == "COMPLETED" and "hook hooked user configured leak None" in log, log
    path, of_a_cluster = log.partition("paths ")[2].split()[:2]
    assert path.startswith(str(det.root / "allocations")) and of_a_cluster == "False"
    (state_file,) = saved.glob("*/state")
    assert state_file.read_text() == "1"
    assert marked("DET_ALLOCATION_ID", f"{trial['taskId']}.1") == []


def test_a_trial_that_ignores_preemption_is_killed_after_its_time(det: Det) -> None:
    deaf = "print('running', flush=True); import time; time.sleep(300)"
    number = det.create(entrypoint=["python3", "-c", deaf], preemption_timeout=1)
    until(lambda: bool(det.trials(number)), "the trial is never made")
    (trial,) = det.trials(number)
    det.wait_for_line(trial["id"], "running")
    det.ok("experiment", "pause", str(number))
    det.idle()
    assert det.state(number) == "PAUSED"
    assert marked("DET_ALLOCATION_ID", f"{trial['taskId']}.1") == []
    det.ok("experiment", "kill", str(number))
    assert det.wait(number) == "CANCELED"


def test_an_ended_experiment_is_continued_and_then_deleted_from_the_disk(det: Det) -> None:
    number = det.create(
        hyperparameters={"steps": 2},
        checkpoint_storage={"type": "shared_fs", "host_path": str(det.folder), "storage_path": "kept"},
    )
    assert det.wait(number) == "COMPLETED"
    storage = det.folder / "kept"
    det.ok("experiment", "continue", str(number), "--config", "hyperparameters.steps=4")
    until(lambda: det.trials(number)[0]["totalBatchesProcessed"] == 4, "it does not go on to step 4")
    assert det.wait(number) == "COMPLETED"
    assert "starts after step 2" in det.logs(det.trials(number)[0]["id"])
    det.idle()  # the older checkpoint is gone by now
    (uuid,) = (file.parent.name for file in storage.glob("*/state.json"))
    assert (storage / uuid / "state.json").exists()
    det.ok("checkpoint", "rm", uuid, "--glob", "state.json", "--yes")
    until(lambda: not (storage / uuid / "state.json").exists(), "the file is not removed")
    det.ok("experiment", "delete", str(number), "--yes")
    until(lambda: det.run("experiment", "describe", str(number)).code == 1, "the experiment is not deleted")
    assert not (storage / uuid).exists()
    gone = det.run("experiment", "describe", str(number)).err
    assert "not found" in gone and "Traceback" not in gone


# Asks for its own trial, for another one, for all experiments, for an end to another trial, and
# once with the token in the user's header. Then the SDK and core_v2, with no login of the user's in
# reach.
INSIDE = """
import json, os, urllib.error, urllib.request
from determined.common.api import errors
from determined.experimental import client, core_v2
import determined

def ask(method, path, header="Grpc-Metadata-x-allocation-token"):
    request = urllib.request.Request(os.environ["DET_MASTER"] + path, method=method)
    request.add_header(header, "Bearer " + os.environ["DET_SESSION_TOKEN"])
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code

own = "/api/v1/trials/" + os.environ["DET_TRIAL_ID"]
asked = [ask("GET", own), ask("GET", "/api/v1/trials/1"), ask("GET", "/api/v1/experiments"), ask("POST", "/api/v1/trials/1/kill")]
print("FOU" + "ND " + json.dumps({"env": dict(os.environ), "asked": [*asked, ask("GET", own, "Authorization")]}))
core_v2.init()
core_v2.train.report_validation_metrics(steps_completed=1, metrics={"validation_loss": 0.5})
with core_v2.checkpoint.store_path({"steps_completed": 1}) as (path, name):
    (path / "weights").write_text("x")
info = determined.get_cluster_info()
trial = client.get_trial(info.trial.trial_id)
print("SDK", [each.uuid for each in trial.list_checkpoints()] == [name], client.get_experiment(info.trial.experiment_id).id)
try:
    client.list_users()
except errors.ForbiddenException as error:
    print("RE" + "FUSED", error)
core_v2.close()
"""


def test_a_trial_knows_its_own_token_and_not_the_users_and_works_with_the_sdk(det: Det) -> None:
    """What a trial finds in its environment opens its own doors only, and none after it has
    ended."""
    home = det.folder / "nobodys-home"
    home.mkdir()
    environment = {"environment_variables": [f"HOME={home}", f"XDG_CONFIG_HOME={home}"]}
    number = det.create(entrypoint=["python3", "-c", INSIDE], environment=environment)
    state = det.wait(number)
    text = det.logs(det.trials(number)[0]["id"])
    assert state == "COMPLETED" and f"SDK True {number}" in text and "REFUSED" in text, text
    assert det.exports["DET_USER_TOKEN"] not in text
    found = json.loads(text.rpartition("FOUND ")[2].splitlines()[0])
    assert found["asked"] == [200, 403, 403, 403, 200]
    assert found["env"]["DET_USER_TOKEN"] == found["env"]["DET_SESSION_TOKEN"]
    api = pytest.importorskip("determined.common.api")
    session = api.TaskSession(det.url, "determined", found["env"]["DET_SESSION_TOKEN"], None)
    with pytest.raises(api.errors.UnauthenticatedException):
        session.get(f"api/v1/trials/{found['env']['DET_TRIAL_ID']}")


def test_a_followed_line_is_printed_while_the_trial_waits_for_its_being_read(det: Det) -> None:
    """The trial goes on only once the original program has printed its line; how soon that is, the
    benchmark measures."""
    script = (
        "import pathlib, time\nfor n in range(3):\n    print('written', n, flush=True)\n"
        f"    while not pathlib.Path({str(det.folder)!r}, f'read-{{n}}').exists():\n        time.sleep(0.02)\n"
    )
    number = det.create(entrypoint=["python3", "-c", script])
    until(lambda: bool(det.trials(number)), "the trial is never made")
    words = [sys.executable, "-u", str(BIN / "det"), "trial", "logs", "-f", str(det.trials(number)[0]["id"])]
    with subprocess.Popen(words, env=det.env(), stdout=subprocess.PIPE, text=True) as follow:
        watchdog = threading.Timer(SECONDS, follow.kill)
        watchdog.start()
        read = []
        for line in follow.stdout or ():
            if "|| written " in line:
                read.append(line.split()[-1])
                (det.folder / f"read-{read[-1]}").touch()
        watchdog.cancel()
    assert (read, follow.returncode) == (["0", "1", "2"], 0)
    assert det.wait(number) == "COMPLETED"
