"""The guard around a rank: its log, its last words, its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.programs import child_environment, write_program
from zero_trial.launch.guard import ERROR_HEADER
from zero_trial.trial.runs.events import read_lines
from zero_trial.trial.runs.run_layout import ErrorRecord, RunFolder, read_errors


def guarded(folder: Path, *arguments: object, rank: int = 3) -> subprocess.CompletedProcess[str]:
    """Run one guarded rank of the run in ``folder``."""
    env = {**child_environment(), "RANK": str(rank), "LOCAL_RANK": "1"}
    words = [sys.executable, "-m", "zero_trial.launch.guard", "--parent", str(os.getpid()), "--run-dir", str(folder)]
    words += map(str, arguments)
    return subprocess.run(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )


def test_a_rank_that_ends_well(tmp_path: Path):
    script = write_program(tmp_path, "print('hello', sys.argv[1:], __name__); os.system('echo from a child')")
    done = guarded(tmp_path, script, "--x", "1")
    assert done.returncode == 0
    assert done.stdout == "hello ['--x', '1'] __main__\nfrom a child\n"
    assert read_errors(tmp_path) == []


def test_an_exception_is_kept_with_the_user_s_line(tmp_path: Path):
    script = write_program(tmp_path, "import json\njson.loads('{')\n")
    done = guarded(tmp_path, script)
    assert done.returncode == 1
    (error,) = read_errors(tmp_path)
    line = script.read_text().splitlines().index("json.loads('{')") + 1
    assert (error.rank, error.type, error.exit_code) == (3, "JSONDecodeError", 1)
    assert error.message.endswith(f"(program.py:{line}: json.loads('{{'))")  # not a line of json's
    after = done.stdout.partition(ERROR_HEADER)[2]
    assert "program.py" in after and "guard.py" not in after


def test_our_own_errors_have_no_traceback(tmp_path: Path):
    script = write_program(tmp_path, "from zero_trial.errors import DoesNotFit\nraise DoesNotFit('too big')\n")
    done = guarded(tmp_path, script)
    assert done.returncode == 3
    (error,) = read_errors(tmp_path)
    assert (error.message, error.exit_code) == ("too big.", 3)
    assert done.stdout == "DoesNotFit: too big.\n"


def test_an_import_of_deepspeed_names_the_option(tmp_path: Path):
    assert guarded(tmp_path, write_program(tmp_path, "import deepspeed\n")).returncode == 1
    (error,) = read_errors(tmp_path)
    assert "No module named 'deepspeed' (program.py" in error.message and "launch --as-deepspeed" in error.message


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("import torch.distributed as dist; dist.get_rank()", "Call zero_trial.init_distributed() before it"),
        ("import torch; torch._C._cuda_setDevice(0)", "Here torch has no GPU"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "put batches on engine.device"),
        ("raise AssertionError('mine')", "raise AssertionError('mine'))"),
    ],
)
def test_a_script_for_gpus_and_groups_is_told_what_to_do(call: str, words: str, tmp_path: Path):
    assert guarded(tmp_path, write_program(tmp_path, call)).returncode == 1
    (error,) = read_errors(tmp_path)
    assert error.message.rstrip(".").endswith(words) or words in error.message.rpartition("). ")[2]


def test_a_file_that_hides_a_package_is_named(tmp_path: Path):
    hiding = write_program(tmp_path, "x = 1\n", "hidden_one.py")
    assert guarded(tmp_path, write_program(tmp_path, "import hidden_one\nimport hidden_one.part\n")).returncode == 1
    (error,) = read_errors(tmp_path)
    assert f"import hidden_one.part). {hiding} hides the package" in error.message


@pytest.mark.parametrize(
    ("said", "type_", "code", "fix"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "WorkerLost", 5, "fewer num_workers"),
        ("[enforce fail] DefaultCPUAllocator: can\\'t allocate memory", "DoesNotFit", 3, "zero-trial plan"),
    ],
)
def test_known_faults_have_their_code_in_a_script_too(said: str, type_: str, code: int, fix: str, tmp_path: Path):
    assert guarded(tmp_path, write_program(tmp_path, f"raise RuntimeError('{said}')")).returncode == code
    (error,) = read_errors(tmp_path)
    assert (error.type, error.exit_code) == (type_, code) and fix in error.message


def test_what_a_rank_says_of_waits_is_an_event_of_the_run(tmp_path: Path):
    waits = "import logging; logging.getLogger('zero_trial.waits').warning('rank %d has waited', 3)"
    assert guarded(tmp_path, write_program(tmp_path, waits)).returncode == 0
    (event,) = read_lines(RunFolder(tmp_path).events)
    assert (event["kind"], event["message"], event["rank"]) == ("note", "rank 3 has waited", 3)


@pytest.mark.parametrize(("call", "code"), [("sys.exit()", 0), ("sys.exit(7)", 7), ("sys.exit('why')", 1)])
def test_exit_codes(call: str, code: int, tmp_path: Path):
    assert guarded(tmp_path, write_program(tmp_path, call)).returncode == code


def test_a_module_in_the_working_folder_and_local_rank(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    write_program(work, "print(sys.argv[1:], os.getcwd())", "job.py")
    done = guarded(tmp_path, "--cwd", work, "--inject-local-rank", "-m", "job", "a")
    assert done.returncode == 0
    assert done.stdout == f"['--local_rank=1', 'a'] {work}\n"


def test_a_program_takes_the_place_of_the_guard(tmp_path: Path):
    code = "import os; print(os.environ['RANK']); raise SystemExit(4)"
    done = guarded(tmp_path, "--exec", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (4, "3\n")


def test_an_error_that_the_trial_has_left_stays(tmp_path: Path):
    script = write_program(
        tmp_path,
        """
        from pathlib import Path
        from zero_trial.trial.runs.run_layout import ErrorRecord, write_error
        write_error(Path.cwd(), ErrorRecord(3, "DataError", "the loader yields nothing", 2, 1.0))
        sys.exit(2)
        """,
    )
    assert guarded(tmp_path, script).returncode == 2
    assert read_errors(tmp_path) == [ErrorRecord(3, "DataError", "the loader yields nothing", 2, 1.0)]


def test_a_disk_that_takes_no_words_does_not_change_the_exit_code(tmp_path: Path):
    """The folder of errors becomes a file while the rank runs."""
    body = "open('errors', 'w').close()\n"
    body += "from zero_trial.errors import CheckpointError\nraise CheckpointError('no room')\n"
    done = guarded(tmp_path, write_program(tmp_path, body))
    assert done.returncode == 5
    assert done.stdout == "CheckpointError: no room.\n"
