"""How zero_trial is installed: its name, what it needs, what it offers on the command line."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
START = """import os; os.environ.get("ZERO_TRIAL_AS_DEEPSPEED", "0") not in ("", "0") and __import__("zero_trial_start")\n"""


class BuildWithStart(build_py):
    """Puts a line beside the package that every Python runs when it starts: zero_trial_start.py
    says what for. ``pip install -e`` installs no such file."""

    @property
    def start(self) -> Path:
        return Path(self.build_lib) / "zero_trial_start.pth"

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.start.write_text(START, encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        own = [] if self.editable_mode else [str(self.start)]
        return [*super().get_outputs(include_bytecode), *own]


# The CUDA compiler with its bindings and disassembler (in two packages), without CUDA: the kernels
# are compiled and inspected on machines that have no GPU.
CUDA_CHECK = [
    f"{name} ; platform_system == 'Linux' and platform_machine == 'x86_64'"
    for name in ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
]

# Label selectors of placement groups came with 2.49. Its wheel brings no torch.
RAY = ["ray>=2.49,<3"]

EXTRAS = {
    "cuda-check": CUDA_CHECK,
    # The cluster's own package; everything but the Determined platform works without it.
    "determined": ["determined==0.38.1"],
    # The embedded master on a Ray cluster: `zero-trial master up --on ray`.
    "ray": RAY,
    "tensorboard": ["tensorboard"],
    # Letters as images: Pillow draws them, in the fonts that come with matplotlib.
    "images": ["matplotlib", "pillow"],
    "test": [
        *CUDA_CHECK,
        "build",
        "hypothesis",
        "matplotlib",
        "mypy",
        "pillow",
        "psutil",
        "pytest",
        "pytest-xdist",
        "ruff",
        "setuptools>=77",
        "tensorboard",
        "types-PyYAML",
        "types-psutil",
        "types-tqdm",
    ],
    # What tests/exactness and tests/compat/deepspeed train with; no CUDA wheel comes with them.
    "libraries": [
        *("accelerate", "bitsandbytes", "datasets", "diffusers", "lightning", "optuna", "peft", "transformers", "trl"),
        *RAY,  # for tests/master
    ],
    # The documentation as a site, with the API reference made from the docstrings.
    "docs": ["mkdocs-material", "mkdocstrings[python]"],
    # Peers that benchmarks/ measures against.
    "bench": ["deepspeed==0.19.8", "psutil"],
}


def version() -> str:
    """The version as zero_trial/__init__.py states it, read without importing the package."""
    text = (HERE / "zero_trial" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("zero_trial/__init__.py: no __version__ line")
    return found.group(1)


def long_description() -> str:
    """README.md for a package index: without images and links within the repository, which lead
    nowhere there, and without the comments that are for its checks."""
    text = re.sub(r"<!--.*?-->\n?", "", (HERE / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    name="zero_trial",
    version=version(),
    description="Sharded, offloaded and pipeline-parallel PyTorch training under one trial class, from a laptop CPU to a cluster.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    packages=find_packages(include=["zero_trial", "zero_trial.*"]),
    py_modules=["zero_trial_start"],
    cmdclass={"build_py": BuildWithStart},
    package_data={
        "zero_trial": [
            *("py.typed", "report/*.css", "report/*.js"),
            "cli/templates/*/*",  # no packages: a user's files
            *("ds_config/inert_keys.json", "ds_config/presets/*.json"),
            *("csrc/*/*.h", "csrc/*/*.cpp", "csrc/*/*.cu"),
            # not a module of the package: Pythons that start with its folder on PYTHONPATH find it
            "compat/start/sitecustomize.py",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",  # the versions that were run: docs/reference/support.md
        "safetensors[torch]>=0.6.2",  # saving through its torch part needs numpy
        "pyyaml",
        "tqdm",
        "shtab",  # zero-trial completion
        "waitress",  # the HTTP server of the master and the board
        "psutil",  # the table of processes: which ones of a run are left
        "google-re2",  # regular expressions of the master's clients, matched in linear time
        # Trials written for Determined do AttrDict(context.get_hparams()). The package `attrdict`
        # does not import on Python >= 3.10; this fork provides the module of that name.
        "attrdict3",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "zero-trial = zero_trial.cli.main:main",
            "zt = zero_trial.cli.main:main",
        ]
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
