"""Statements that the package does without: assert, global, pickle, unpacking of archives, and
reading the environment in passing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import Module, modules

# Where the environment may be read: the one reader of rank variables, those who start processes,
# the stand-in for DeepSpeed, which must be there before any other import, and the choice of
# kernels, which is one of the machine (compiler, cache folder, ZERO_TRIAL_OPS) and holds for
# scripts that use nothing but the optimizers.
ENVIRONMENT_READERS = (
    "zero_trial",
    "zero_trial.compat.deepspeed.deepspeed_table",
    "zero_trial.comm.rendezvous",
    "zero_trial.launch.",
    "zero_trial.cli.",
    "zero_trial.ops.cpu_library",
    "zero_trial.ops.cuda_runtime",
    "zero_trial.compat.start.",
    "zero_trial.master.agent.node",
    "zero_trial.master.agent.ray",
)

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
TORCH_FILES = {"torch.load", "torch.save", "torch.jit.load", "torch.jit.save"}

# Foreign checkpoints are pickles: read by torch.load(weights_only=True), and by an unpickler that
# finds no class.
MAY_UNPICKLE = ("zero_trial.compat.importing.torch_file",)
# zero_to_fp32 writes pytorch_model.bin, tensors alone, for scripts that expect this file; it reads
# none.
MAY_SAVE = ("zero_trial.compat.importing.zero_to_fp32",)


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
    """Every node of these kinds in the package, with its module."""
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, kinds):
                yield module, node


def place(module: Module, node: ast.AST) -> str:
    return f"{module.place}:{getattr(node, 'lineno', '?')}"


def environment_uses(tree: ast.AST) -> list[ast.AST]:
    """os.environ, os.getenv, os.putenv, however os was imported under its own name, and ``from os
    import environ``."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "os.environ",
            "os.getenv",
            "os.putenv",
            "os.environb",
        ):
            found.append(node)
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv", "putenv"}
        ):
            found.append(node)
    return found


def pickle_uses(tree: ast.AST) -> list[ast.AST]:
    """Imports of pickling modules and calls of torch's pickling functions."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in PICKLES for alias in node.names):
            found.append(node)
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in PICKLES or names & TORCH_FILES:
                found.append(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in TORCH_FILES:
            found.append(node)
    return found


def unpacks(node: ast.AST) -> bool:
    """``archive.extract`` and ``archive.extractall``; ``extractfile`` writes nothing."""
    return isinstance(node, ast.Attribute) and node.attr in ("extract", "extractall")


def test_no_asserts():
    """They vanish under ``python -O``; raise a typed error."""
    assert [place(module, node) for module, node in nodes(ast.Assert)] == []


def test_no_globals():
    """State lives in an object whose job it is."""
    assert [place(module, node) for module, node in nodes(ast.Global)] == []


def test_the_environment_is_read_in_one_place():
    found = [
        place(module, node)
        for module in modules()
        if not any(
            module.name == reader or (reader.endswith(".") and module.name.startswith(reader))
            for reader in ENVIRONMENT_READERS
        )
        for node in environment_uses(module.tree)
    ]
    assert found == []


def test_nothing_is_pickled():
    found = [
        place(m, node)
        for m in modules()
        if m.name not in MAY_UNPICKLE
        for node in pickle_uses(m.tree)
        if not (m.name in MAY_SAVE and ast.unparse(node) == "torch.save")
    ]
    assert found == []


def test_nothing_waits_for_a_later_patch_of_python():
    """tarfile's filters came with 3.10.12 and 3.11.4; Debian 12 has 3.11.2. Without one a
    member's name decides where it is written."""
    found = [place(module, node) for module, node in nodes(ast.Attribute) if unpacks(node)]
    assert found == []


def test_torch_distributed_has_one_caller():
    """comm/ owns the groups and counts the traffic. ``cli/env`` only asks what is available,
    ``runtime/agent`` is the launcher."""
    callers = {m.name for m in modules() for item in m.imports() if item.module.startswith("torch.distributed")}
    assert {name for name in callers if not name.startswith("zero_trial.comm")} <= {
        "zero_trial.cli.cmd_start",
        "zero_trial.checkpoint.export_dcp",  # writes a file format of torch, in one process
        "zero_trial.launch.meeting",  # the hosts of a run, before there is any rank
        "zero_trial.compat.deepspeed.deepspeed_comm",  # hands torch's functions to scripts
    }


def test_the_rules_can_fail():
    assert unpacks(ast.parse("tar.extractall", mode="eval").body)
    assert len(environment_uses(ast.parse("import os\nos.environ['A']\nos.getenv('B')\nfrom os import environ"))) == 3
    assert (
        len(
            pickle_uses(
                ast.parse(
                    "import pickle\nimport torch\ntorch.load('x')\nfrom torch import save\nfrom dill import loads"
                )
            )
        )
        == 4
    )
