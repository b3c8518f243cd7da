"""The numeric tests pass on other processors, which settings of torch and MKL stand in for:
tolerances follow from the arithmetic.

Another processor adds up in another order and fuses other products. A tolerance that was read off
one machine fails here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "MKL_CBWR=COMPATIBLE",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX512",
)
NUMERIC = [
    *(
        f"engine/test_{topic}.py"
        for topic in ("oracle", "keys", "precision", "models", "optimizers", "user_code", "kernels_of_engines")
    ),
    *(
        f"engine/test_{topic}.py"
        for topic in ("parallel_models", "backward", "pipeline_engine", "pipeline_build", "pipeline_data_and_faults")
    ),
    *("compat/importing/test_deepspeed.py", "ops", "pipeline", "sharding/test_layout.py"),
]


def test_the_numeric_tests_are_there() -> None:
    assert [name for name in NUMERIC if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.extended
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_numeric_tests_pass(setting: str) -> None:
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not extended", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in NUMERIC)],
        cwd=ROOT,
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
