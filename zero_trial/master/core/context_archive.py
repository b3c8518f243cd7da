"""A submitted model definition as a clean .tar.gz: one directory that contains only plain files and
directories.

Clients send a list of files (``modelDefinition``) with arbitrary paths, types and sizes. Nothing is
unpacked. A new archive is written in memory from the allowed parts, so it contains no links,
devices, owners or paths that lead outside. Checks of the sources read this new archive.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import importlib.util
import io
import posixpath
import re
import stat
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import AS_DETERMINED, DEEPSPEED_LAUNCHER, check_entrypoint, parse_entrypoint
from zero_trial.master.records import Invalid
from zero_trial.master.search.pruning import ds_config_file

MAX_BYTES = (
    128 * 1024 * 1024 // 8 * 6 - 1024 * 1024
)  # total bytes of contents: the maximum that Determined's own client sends (95 MiB)
MAX_FILES = 20_000
_MAX_PATH = 1024  # bytes of a path
_MAX_PART = 255  # bytes of one path component, the limit of common file systems

_HOOK = "startup-hook.sh"
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
_LARGEST_CONFIG = 4 << 20  # maximum bytes of a file that may contain a ds_config
_LARGEST_SOURCES = 2 << 20  # bytes of Python source that are checked before an experiment starts
_IMPORTS_DEEPSPEED = re.compile(rb"^(import|from) deepspeed\b", re.MULTILINE)
_OURS = frozenset({"zero_trial.run", AS_DETERMINED})
_MOVES = frozenset({"--model-dir", "cd", "sh", "bash"})  # words after which the ranks may run in another folder


@dataclass(frozen=True)
class ArchiveEntry:
    """One file or directory of a model definition. A directory has the ``content`` None."""

    path: str
    content: bytes | None
    mode: int = 0o644
    mtime: int = 0


def from_model_definition(files: Sequence[Mapping[str, Any]]) -> bytes:
    """Build the .tar.gz from ``[{path, type, content, mtime, mode, ...}]`` as clients send it.

    Raises Invalid, with the path, for anything that is not allowed.
    """
    if len(files) > MAX_FILES:
        raise Invalid(
            f"the model definition has {len(files)} files, at most {MAX_FILES} are accepted",
            fix="List files that are not needed in .detignore.",
        )
    return write(_entry(file) for file in files)


def _entry(file: Mapping[str, Any]) -> ArchiveEntry:
    if not isinstance(file, Mapping) or not isinstance(file.get("path"), str):
        raise Invalid("a file of the model definition has no path")
    path = clean_path(file["path"])
    kind = chr(_integer(file.get("type"), ord("0")) & 0x7F).encode()
    mode, mtime = _integer(file.get("mode"), 0o644), _integer(file.get("mtime"), 0)
    if not 0 <= mode < 1 << 32:  # Go sends the file type in the upper bits
        raise Invalid(f"the mode of {path!r} is not a file mode", got=mode)
    if kind == tarfile.DIRTYPE:
        return ArchiveEntry(path, None, mode, mtime)
    if kind not in (tarfile.REGTYPE, tarfile.AREGTYPE) or (stat.S_IFMT(mode) not in (0, stat.S_IFREG)):
        raise Invalid(
            f"{path!r} is neither a file nor a directory",
            fix="Links and devices are not accepted; replace them with the files they refer to.",
        )
    if mode & (stat.S_ISUID | stat.S_ISGID):
        raise Invalid(f"{path!r} has a set-user-ID or set-group-ID bit", fix="Remove it: chmod ug-s.")
    content = file.get("content") or ""
    try:
        return ArchiveEntry(path, base64.b64decode(content, validate=True), mode, mtime)
    except (binascii.Error, ValueError, TypeError):
        raise Invalid(f"the content of {path!r} is not base64") from None


def clean_path(path: str) -> str:
    """Return the normalized path. Raises Invalid unless the path is relative and stays inside."""
    shown = path if len(path) <= 80 else path[:77] + "..."
    if not path or path.startswith("/") or "\\" in path or "\0" in path:
        raise Invalid(
            f"the path {shown!r} is not a relative path", fix="Paths are relative, with / between their parts."
        )
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in path):
        raise Invalid(f"the path {shown!r} contains control characters")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Invalid(f"the path {shown!r} is outside of the model definition", fix="Remove the '..' component.")
    short = posixpath.join(*parts) if parts else "."
    if len(short.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_PART for part in parts):
        raise Invalid(f"the path {shown!r} is too long")
    return short


def write(entries: Iterable[ArchiveEntry]) -> bytes:
    """Build a .tar.gz of the entries: owner root, no special bits, parents before children.

    Raises Invalid for duplicate paths, and if the contents exceed MAX_BYTES.
    """
    kept = _checked(entries)
    raw = io.BytesIO()
    # mtime 0: the same files produce the same bytes.
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(kept):
            entry = kept[path]
            archive.addfile(_header(entry), io.BytesIO(entry.content) if entry.content is not None else None)
    return raw.getvalue()


def _checked(entries: Iterable[ArchiveEntry]) -> dict[str, ArchiveEntry]:
    kept: dict[str, ArchiveEntry] = {}
    total = 0
    for entry in entries:
        if entry.path == ".":
            if entry.content is not None:
                raise Invalid("a file of the model definition has no name")
            continue
        if entry.path in kept:
            raise Invalid(f"the path {entry.path!r} appears twice")
        total += len(entry.content or b"")
        if total > MAX_BYTES:
            raise Invalid(
                f"the model definition is larger than {MAX_BYTES} bytes",
                fix="List files that are not needed in .detignore.",
            )
        kept[entry.path] = entry
    for path in kept:
        parent = posixpath.dirname(path)
        while parent:
            if parent in kept and kept[parent].content is not None:
                raise Invalid(f"{parent!r} is a file and cannot contain {path!r}")
            parent = posixpath.dirname(parent)
    return kept


def _header(entry: ArchiveEntry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.path)
    info.mtime = min(max(entry.mtime, 0), 2**33 - 1)
    if entry.content is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size = len(entry.content)
        info.mode = 0o755 if entry.mode & 0o100 else 0o644
    return info


def _integer(value: Any, default: int) -> int:
    """Return ``value`` as an integer; protobuf sends 64-bit integers as text. Raises Invalid."""
    if value is None or value == "":
        return default
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{str(value)[:40]!r} is not a whole number") from None


@dataclass(frozen=True)
class Context:
    """The parts of a context directory that the master itself reads."""

    files: Mapping[str, bytes]
    has_hook: bool


def read_context(tgz: bytes) -> Context:
    """Read the small configuration files in a clean .tar.gz."""
    files: dict[str, bytes] = {}
    has_hook = False
    if not tgz:
        return Context(files, has_hook)
    with tarfile.open(fileobj=io.BytesIO(tgz), mode="r:gz") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            has_hook = has_hook or name == _HOOK
            if member.isfile() and name.endswith(_CONFIG_SUFFIXES) and member.size <= _LARGEST_CONFIG:
                content = archive.extractfile(member)
                files[name] = content.read() if content is not None else b""
    return Context(files, has_hook)


def check_model(config: Mapping[str, Any], tgz: bytes) -> None:
    """Reject an experiment if its model definition shows that the ranks would fail before they
    train: the class or the ds_config file does not exist, or deepspeed cannot be imported.

    Cases that only a run can decide are accepted: programs other than ours, programs that change or
    name their folder, startup hooks (they may write files), and sources too large to read here.
    Raises Invalid.
    """
    given = config.get("entrypoint")
    words = given.split() if isinstance(given, str) else [str(word) for word in given or ()]
    if not tgz or not words or not _MOVES.isdisjoint(words):
        return
    with tarfile.open(fileobj=io.BytesIO(tgz), mode="r:gz") as archive:
        files = {member.name.removeprefix("./"): member for member in archive if member.isfile()}
        if _HOOK in files:
            return
        if DEEPSPEED_LAUNCHER in words or len(words) == 1:
            _check_deepspeed(words, archive, files)
        ours = not _OURS.isdisjoint(words)
        if ours and not (AS_DETERMINED in words and any(word.endswith(".py") for word in words)):
            _check_class(words, archive, files)
    if "zero_trial.run" not in words:
        return  # the trial's own code opens its ds_config
    named = ds_config_file(config, config.get("hyperparameters") or {})
    if named is None or posixpath.isabs(named) or posixpath.normpath(named) in files:
        return
    there = sorted(name for name in files if name.endswith(_CONFIG_SUFFIXES))
    raise Invalid(
        "the model definition has no such file",
        where="data.ds_config",
        got=named,
        expected=f"one of {', '.join(there[:8])}" if there else "a file in the submitted folder",
    )


def _check_deepspeed(words: Sequence[str], archive: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo]) -> None:
    """Raise Invalid if Determined's launcher for DeepSpeed, or the module of a ``module:Class``
    entrypoint without a command, would import deepspeed but could not find it."""
    if importlib.util.find_spec("deepspeed") is not None or any(name.startswith("deepspeed/") for name in files):
        return
    if DEEPSPEED_LAUNCHER not in words:
        source = files.get(f"{words[0].partition(':')[0].replace('.', '/')}.py")
        content = archive.extractfile(source) if source is not None and source.size <= _LARGEST_SOURCES else None
        if content is None or _IMPORTS_DEEPSPEED.search(content.read()) is None:
            return
    own = f"python3 -m determined.launch.torch_distributed python3 -m {AS_DETERMINED} {words[-1]}"
    raise Invalid(
        "this imports deepspeed, which is not installed",
        where="entrypoint",
        got=" ".join(words),
        fix=f"Write entrypoint: {own}, so that zero_trial trains the same files.",
    )


def _check_class(words: Sequence[str], archive: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo]) -> None:
    """Raise Invalid if the sources show that the entrypoint's class does not exist."""
    try:
        entrypoint = parse_entrypoint(words)
        stem = entrypoint.module.replace(".", "/")
        own = {f"{stem}.py", f"{stem}/__init__.py"}
        sources = [name for name in files if name in own or (name.endswith(".py") and "/" not in name)]
        if sum(files[name].size for name in sources) > _LARGEST_SOURCES:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name in sources:
                content, target = archive.extractfile(files[name]), Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read() if content is not None else b"")
            check_entrypoint(entrypoint, Path(folder), "entrypoint", shown="the model definition")
    except ConfigError as fault:
        raise Invalid(fault.what, where=fault.where, got=fault.got, fix=fault.fix) from None
