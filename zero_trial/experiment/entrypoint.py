"""The entrypoint: which trial class, in which file, found by reading the source without running
it."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.util.function_source import returned_names
from zero_trial.util.speed import SPEED_METRIC

BASE = "ZeroTrial"
AS_DETERMINED = "zero_trial.as_determined"
_DEEPSPEED_LAUNCHERS = (AS_DETERMINED, "determined.launch.deepspeed")
_COUNTERS = ("batches", "epochs")  # every validation reports them
_OTHER_WAYS = ("wrap_reducer", "evaluate_batch", "evaluate_full_dataset")  # by which metrics come from elsewhere
_REQUIRED = ("train_batch", "build_training_data_loader")
_OPTIONAL = (
    *("build_validation_data_loader", "evaluate_batch", "evaluate_full_dataset", "evaluation_reducer"),
    *("build_callbacks", "get_batch_length"),
)
_MISSPELLED = 0.85  # build_val_data_loader is 0.857 alike, evaluate_batches 0.93; evaluate_batch_fast 0.848
_NO_TRIALS = frozenset({"torch", *sys.stdlib_module_names})  # packages whose classes are no trials
# their modules are zero_trial's own where as_determined imports the trial
_ANSWERED_FOR = frozenset({"deepspeed", "determined"})
_SEARCH = re.compile(r"\b(sys\s*\.\s*(path|modules)|from\s+sys\b|meta_path|path_hooks|site|importlib)\b")
_FORM = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Entrypoint:
    """A class by module and name, written ``module:Class``."""

    module: str
    name: str
    as_determined: bool = False
    """Whether the command says that the class is a DeepSpeedTrial of Determined."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def file(self, model_dir: Path) -> Path | None:
        """Return the module's source in the model folder, or None."""
        stem = model_dir.joinpath(*self.module.split("."))
        candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)


def parse_entrypoint(value: str | Sequence[str] | None, where: str = "entrypoint") -> Entrypoint:
    """Return the class that an experiment's ``entrypoint`` names: ``model_def:MyTrial`` alone, or
    last in a cluster's launch command (``python3 -m determined.launch.torch_distributed python3 -m
    zero_trial.run model_def:MyTrial``). With ``zero_trial.as_determined``, or Determined's launcher
    for DeepSpeed, it is a DeepSpeedTrial.
    """
    words = value.split() if isinstance(value, str) else list(value or ())
    found = [match for word in words if (match := _FORM.fullmatch(word))]
    if len(found) != 1:
        raise ConfigError(
            "no trial class is named",
            where=where,
            got=repr(" ".join(words)) if words else "nothing",
            expected="module:Class",
            fix="Write entrypoint: model_def:MyTrial.",
        )
    return Entrypoint(found[0][1], found[0][2], as_determined=starts_deepspeed_trial(words))


def starts_deepspeed_trial(words: str | Sequence[str]) -> bool:
    """Return whether an ``entrypoint`` says that its class is a DeepSpeedTrial of Determined, whose
    code reads the ds_config and lays hyperparameters over it."""
    return any(word in _DEEPSPEED_LAUNCHERS for word in (words.split() if isinstance(words, str) else words))


def files_with(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the Python files in ``folders`` that define a class ``name``; others are passed
    over."""
    found = []
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.py"))):
        try:
            source = _read_source(path, str(path))
        except ConfigError:
            continue
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in source.body):
            found.append(path)
    return found


def check_entrypoint(
    entrypoint: Entrypoint, model_dir: Path, where: str | None = None, *, shown: str | None = None
) -> None:
    """Raise ConfigError when the source shows that the class does not exist. What only running
    could show passes. ``shown``: the folder's name in messages."""
    path = entrypoint.file(model_dir)
    if path is None:
        there = sorted(p.name for p in model_dir.glob("*.py")) if model_dir.is_dir() else []
        raise ConfigError(
            f"{entrypoint}: there is no module {entrypoint.module} in {shown or model_dir}"
            + (f"; it holds {', '.join(there[:8])}" if there else "; it holds no Python files"),
            where=where,
            fix=_advice(entrypoint.module, [Path(name).stem for name in there], f":{entrypoint.name}"),
        )
    source = _read_source(path, str(path.relative_to(model_dir) if shown else path))
    if not entrypoint.as_determined:
        _check_methods(entrypoint.name, source, str(path.relative_to(model_dir)))
    trials = trial_classes(source)
    if entrypoint.name in trials or entrypoint.name in _imported_or_assigned(source):
        return
    defined = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == entrypoint.name]
    file = f"./{path.relative_to(model_dir)}"
    it_defines = f"it defines {', '.join(f'{name}({BASE})' for name in trials)}" if trials else f"it defines no {BASE}"
    if defined and not _surely_no_trial(defined[0], source, model_dir):
        return  # a base comes from elsewhere and may well be a trial
    what = f"{entrypoint} is not a {BASE}" if defined else f"{entrypoint} not found"
    elsewhere = [] if defined else [found.stem for found in files_with(entrypoint.name, [model_dir])]
    raise ConfigError(
        f"{what} in {file}; {it_defines}",
        where=where,
        fix=_advice(entrypoint.module, elsewhere, after=f":{entrypoint.name}")
        or _advice(entrypoint.name, trials, before=f"{entrypoint.module}:")
        or f"Write class {entrypoint.name}({BASE}) there.",
    )


def _check_methods(name: str, source: ast.Module, file: str) -> None:
    """Raise ConfigError where a trial whose only base is zero_trial's ZeroTrial lacks a method that
    every trial must have."""
    trial = _own_trial(name, source)
    if trial is None:
        return
    for method, near in _missing(trial, source, _REQUIRED):
        raise ConfigError(
            f"{name} has {near.name}, which zero_trial never calls, and no {method}"
            if near
            else f"{name} has no {method}, which every {BASE} must have",
            where=f"{file}:{(near or trial).lineno}",
            fix=f"Did you mean {method}?" if near else f"Write def {method}.",
        )


def warn_of_methods(entrypoint: Entrypoint, model_dir: Path) -> list[str]:
    """Return a warning for each method whose name is nearly that of one that a trial may have: it
    may be misspelled, or a helper that another file calls."""
    path = entrypoint.file(model_dir)
    if path is None or entrypoint.as_determined:
        return []
    source = _read_source(path, str(path))
    trial = _own_trial(entrypoint.name, source)
    return [
        f"{path.relative_to(model_dir)}:{near.lineno}: {entrypoint.name} has {near.name}, which nothing in this file "
        f"calls, and no {method}. Did you mean {method}?"
        for method, near in (_missing(trial, source, _OPTIONAL) if trial is not None else ())
        if near is not None
    ]


def _own_trial(name: str, source: ast.Module) -> ast.ClassDef | None:
    """Return the class, where its only base is zero_trial's ZeroTrial and it has methods: one
    without any is not written yet."""
    if dict(_imports(source.body)).get(BASE) not in (f"zero_trial.{BASE}", "zero_trial.trial.ZeroTrial"):
        return None
    found = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(found) != 1 or found[0].decorator_list or found[0].keywords or [_name(b) for b in found[0].bases] != [BASE]:
        return None
    return found[0] if any(isinstance(node, ast.FunctionDef) for node in found[0].body) else None


def _missing(
    trial: ast.ClassDef, source: ast.Module, wanted: Iterable[str]
) -> Iterator[tuple[str, ast.FunctionDef | None]]:
    """Yield each wanted method that nothing in the class binds and that the file does not set on
    anything, with the unused method whose name is nearly the same."""
    bound = _bound(trial)
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            bound.add(node.value)  # setattr
    used = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    methods = {node.name: node for node in trial.body if isinstance(node, ast.FunctionDef)}
    spare = [each for each in methods if each not in (*_REQUIRED, *_OPTIONAL) and each not in used]
    for method in wanted:
        if method not in bound:
            near = difflib.get_close_matches(method, spare, n=1, cutoff=_MISSPELLED)
            yield method, methods[near[0]] if near else None


def _bound(trial: ast.ClassDef) -> set[str]:
    """Return the names that anything in a class binds, imports included."""
    names = set()
    for node in ast.walk(trial):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def check_metric(entrypoint: Entrypoint, model_dir: Path, metric: Any, where: str | None = None) -> None:
    """Raise ConfigError when the source shows that the trial never reports the searcher's metric.

    What only running could show passes: metrics that ``evaluate_batch`` does not name in its
    source, bases other than ZeroTrial itself, reducers, and code elsewhere that gets the trial or
    its context and may wrap some.
    """
    path = entrypoint.file(model_dir)
    if path is None or entrypoint.as_determined or not metric or metric in (*_COUNTERS, SPEED_METRIC):
        return
    source = _read_source(path, str(path))
    trial = next(
        (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == entrypoint.name), None
    )
    if trial is None or trial.decorator_list or trial.keywords or [_name(base) for base in trial.bases] != [BASE]:
        return
    methods = {node.name: node for node in trial.body if isinstance(node, ast.FunctionDef)}
    if "evaluate_batch" not in methods or "evaluate_full_dataset" in methods or _hands_on(trial, methods):
        return
    if any(isinstance(node, ast.Attribute) and node.attr in _OTHER_WAYS for node in ast.walk(source)):
        return
    names = returned_names(methods["evaluate_batch"])
    if names is None or metric in names:
        return
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    fix = f"Write metric: {min(names)}." if len(names) == 1 else "Name one of these."
    raise ConfigError(f'"{metric}" never reported; the trial reports [{listed}]', where=where, fix=fix)


def check_imports(entrypoint: Entrypoint, model_dir: Path) -> None:
    """Raise ConfigError when the trial's module imports a package that is neither here nor in the
    model folder. Runs nothing of it.

    Only imports before anything that may change where Python searches are judged: calls,
    conditions, modules of the user's own. A source that names what would change it is not judged.
    """
    path = entrypoint.file(model_dir)
    if path is None:
        return
    text = _read_text(path, str(path))
    if _SEARCH.search(text):
        return
    source = _parsed(text, path, str(path))
    for node in source.body:
        if not _leaves_search(node):
            return
        for _, name in _imports([node]):
            package = name.partition(".")[0]
            if package in _ANSWERED_FOR or package in sys.modules:
                continue
            if _is_beside(package, model_dir):
                return
            if find_spec(package) is None:
                near = difflib.get_close_matches(package, ("zero_trial",), n=1, cutoff=0.8)
                folder = "this folder" if model_dir == Path() else model_dir
                raise ConfigError(
                    f"No module named '{package}'",
                    where=f"{path.relative_to(model_dir)}:{node.lineno}",
                    got=ast.unparse(node),
                    fix=("Did you mean zero_trial? Otherwise install" if near else "Install")
                    + f" it where {sys.executable} finds it, or put {package}.py into {folder}.",
                )


def _is_beside(package: str, model_dir: Path) -> bool:
    """Return whether ranks find the package where they search first: in the model folder, or in the
    one that they were started in."""
    return PathFinder.find_spec(package, [str(model_dir), str(Path.cwd())]) is not None


def _leaves_search(node: ast.stmt) -> bool:
    """Return whether a statement of a module cannot change where imports after it are searched."""
    if isinstance(node, ast.ImportFrom):
        return not node.level
    if isinstance(node, ast.Import | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        plain = all(isinstance(target, ast.Name) for target in targets)
        return plain and not (node.value and any(isinstance(each, ast.Call) for each in ast.walk(node.value)))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _hands_on(trial: ast.ClassDef, methods: Mapping[str, ast.FunctionDef]) -> bool:
    """Return whether the class gives itself or its context, by any name, to a call."""
    init = methods.get("__init__")
    own = {"self", *([arg.arg for arg in init.args.args[1:2]] if init is not None else [])}
    for target, value in _assignments(trial):
        if _bare(value, own):
            own |= {node.attr if isinstance(node, ast.Attribute) else node.id for node in _named(target)}
    calls = [node for node in ast.walk(trial) if isinstance(node, ast.Call)]
    return any(_bare(value, own) for call in calls for value in (*call.args, *(each.value for each in call.keywords)))


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value of every assignment, those of ``a, b = c, d`` one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def _named(tree: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))


def _bare(tree: ast.AST, names: set[str]) -> bool:
    """Return whether one of the names stands in the expression by itself or as ``self.name``, and
    not only for an attribute of it."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return any(
        (node.id if isinstance(node, ast.Name) else node.attr) in names
        for node in _named(tree)
        if id(node) not in inner
    )


def _read_source(path: Path, shown: str) -> ast.Module:
    """Return the syntax tree of a file. Raises ConfigError with ``shown``, the file's name in
    messages, and the line for a syntax error."""
    return _parsed(_read_text(path, shown), path, shown)


def _read_text(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}", where=shown) from None


def _parsed(text: str, path: Path, shown: str) -> ast.Module:
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"not Python: {error.msg}", where=f"{shown}:{error.lineno}", got=repr((error.text or "").strip()[:80])
        ) from None
    except (MemoryError, RecursionError, ValueError) as error:
        raise ConfigError(f"Python's own parser does not take it: {type(error).__name__}", where=shown) from None


def trial_classes(source: ast.Module) -> list[str]:
    """Return the module's classes that descend from ZeroTrial, as far as the file itself shows, in
    the order of definition.
    """
    aliases = {BASE}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == BASE}
    found: list[str] = []
    for node in source.body:
        if isinstance(node, ast.ClassDef) and any(_name(base) in aliases for base in node.bases):
            found.append(node.name)
            aliases.add(node.name)
    return found


def _name(base: ast.expr) -> str | None:
    """Return the last part of a base class's name: ``zero_trial.ZeroTrial[int]`` is ZeroTrial."""
    if isinstance(base, ast.Subscript):
        return _name(base.value)
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else None


def _imported_or_assigned(source: ast.Module) -> set[str]:
    """Return names that the module gets by import or assignment; what they are, only running it
    would show."""
    names: set[str] = set()
    for node in source.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _surely_no_trial(node: ast.ClassDef, source: ast.Module, model_dir: Path) -> bool:
    """Return whether all that the class descends from is defined in this very file, or comes from
    packages that have no trials, unless a module of the user's own has such a name."""
    local = {item.name: item for item in source.body if isinstance(item, ast.ClassDef) and item is not node}
    packages = {alias: name.partition(".")[0] for alias, name in _imports(source.body)}
    for base in node.bases:
        first = _first_name(base)
        if isinstance(base, ast.Name) and first in local:
            others = ast.Module([item for item in source.body if item is not node], [])
            if not _surely_no_trial(local[first], others, model_dir):
                return False
        elif first not in ("object", "Exception"):
            package = packages.get(first)
            if package not in _NO_TRIALS or _is_beside(package, model_dir):
                return False
    return True


def _first_name(base: ast.expr) -> str:
    """Return the first part of a base class's name: ``torch.nn.Module[int]`` is torch; nothing for
    what is no name, such as a call."""
    while isinstance(base, ast.Attribute | ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


def _imports(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield by its name here each module, or module and name in it, that one of the statements
    imports from elsewhere."""
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _advice(wanted: str, names: Sequence[str], after: str = "", before: str = "") -> str | None:
    """Return ``Use entrypoint: …`` with the only name in ``names``, or the nearest."""
    near = list(names) if len(names) == 1 else difflib.get_close_matches(wanted, names, n=1)
    return f"Use entrypoint: {before}{near[0]}{after}." if near else None
