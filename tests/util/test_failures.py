"""The user's line is found among those of Python, of packages and of this one."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

import zero_trial
from zero_trial.errors import DoesNotFit, ZeroTrialError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.util.failures import LONGEST_LINE, known_fault, user_line, with_user_line


def caught(text: str, name: str = "/somewhere/model_def.py") -> BaseException:
    """What the text raises, as if it stood in that file."""
    try:
        exec(compile(text, name, "exec"), {"json": json, "torch": torch})
    except Exception as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError("nothing was raised")


def test_which_line_is_the_users(tmp_path: Path):
    """The one that called into a library, whose own frames come after it; none of a package or of
    this one; in a folder with a longer name than this package's, too."""
    assert user_line(caught("def read():\n    json.loads('{')\nread()")) == "model_def.py:2 in read"
    assert user_line(caught("1 / 0", "/venv/lib/python3.11/site-packages/torch/nn/x.py")) is None
    assert user_line(ValueError("never raised")) is None
    generated = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = dataclasses.field(default_factory=json.loads)\nA()"
    assert user_line(caught(generated)) == "model_def.py:5"  # not <string>, the class's __init__
    assert user_line(caught("1 / 0", "<string>")) == "<string>:1"
    assert user_line(caught("1 / 0", f"{Path(zero_trial.__file__).parent}_demo/train.py")) == "train.py:1"
    with pytest.raises(ZeroTrialError) as raised:
        read_experiment("no such file")  # type: ignore[arg-type]
    line = user_line(raised.value)
    assert line is not None and line.startswith("test_failures.py:")
    with pytest.raises(ZeroDivisionError) as divided:
        1 / 0  # noqa: B018
    line = user_line(divided.value)
    assert line is not None and line.startswith("test_failures.py:") and line.endswith("1 / 0  # noqa: B018")
    text = f"1 / 0  # {'x' * LONGEST_LINE}"
    (tmp_path / "model_def.py").write_text(text)
    line = user_line(caught(text, str(tmp_path / "model_def.py")))
    assert line == f"model_def.py:1: {text[: LONGEST_LINE - 4]} ..."


def test_next_to_one_line_and_below_several():
    error = caught("1 / 0")
    assert with_user_line("words", error) == "words (model_def.py:1)"
    assert with_user_line("many\nwords", error) == "many\nwords\n(model_def.py:1)"
    assert with_user_line("words", ValueError()) == "words"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (caught("torch.empty(10**16)"), "model_def.py:1: memory ran out: DefaultCPUAllocator: can't allocate memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory ran out: CUDA out of memory"),
        (
            RuntimeError("CUDA error: out of memory\nSee CUDA_LAUNCH_BLOCKING"),
            "memory ran out: CUDA error: out of memory.",
        ),
        (MemoryError(), "memory ran out: MemoryError. Halve"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out: [Errno 12]"),
    ],
    ids=["torch", "cuda", "runtime", "python", "system"],
)
def test_memory_that_runs_out(error: BaseException, said: str):
    fault = known_fault(error)
    assert isinstance(fault, DoesNotFit) and fault.exit_code == 3 and fault.__cause__ is error
    assert str(fault).startswith(said) and known_fault(error, "rank 1").where == "rank 1"
    assert known_fault(ValueError("mine")) is None and known_fault(OSError(errno.ENOSPC, "full")) is None
