"""Save a checkpoint while training goes on.

    call            rank 0 makes the temporary folder; each rank writes what lives on NVMe into a
                    file of its own, and copies what user code can write to into host memory
    background      each rank copies masters and optimizer state, before they are updated (see
                    ``snapshot``), and writes all copies, with SHA-256; ranks other than 0 leave a
                    report beside their file. Rank 0 waits for those, writes the manifest, renames
    step boundary   one exchange of one integer per rank, only while a save is under way: all ranks
                    learn at the same step that it is complete, or that it failed

The commit needs no collective, since all ranks see one folder. So a save also completes while the
interpreters end: their threads are waited for.

Host memory: the bytes of what a rank writes, less what lives on NVMe. With Adam that is 12/N per
parameter in fp32 (parameters and two moments) and in 16 bits (masters and moments), N ranks on the
shard axis; at stage 0 the first rank has 12, the others none. Pinned where tensors are on a device.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.format import Slice, check_tag, seal
from zero_trial.checkpoint.snapshot import PartOwner, Snapshot, SnapshotBuffer
from zero_trial.checkpoint.writer import (
    DurableFiles,
    Ranks,
    agree,
    begin,
    commit,
    rank_file,
    write_file,
)
from zero_trial.errors import CheckpointError

log = logging.getLogger("zero_trial")

LOOK_SECONDS = 0.02  # how often rank 0 looks for the reports of other ranks
_END_SECONDS = 0.1  # how often a thread whose fault was not reported yet checks whether the program ends
PATIENCE_SECONDS = 30.0
"""How long rank 0 waits for the others' reports after its own program has ended, counted from the
last change of any file: their programs may have been killed."""

_MARGIN = 1 << 20  # bytes: for random states, counters and what alignment leaves free


class _State(IntEnum):
    """How far a rank's part of a save is. The order is that of an exchange's maximum."""

    WRITING = 0
    WRITTEN = 1  # this rank's files and report
    COMMITTED = 2  # rank 0: all of it
    FAILED = 3


@dataclass(frozen=True)
class _Content:
    """What one rank gives to a save, ready to be written at any time.

    Attributes:
        snapshot: of the slices; None beside a fault.
        first: the report of what was written at the call.
        fault: why this rank has nothing to write.
    """

    step: int
    state: Any
    rank_state: Any
    world: Mapping[str, Any]
    snapshot: Snapshot | None = None
    first: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


class _BackgroundSave:
    """This rank's part of one save under way: a thread that writes, and how far it is."""

    def __init__(self, folder: Path, final: Path, content: _Content, ranks: Ranks, disk: DurableFiles) -> None:
        self.final = final
        self.folder = folder
        self.state = _State.WRITING
        self.fault: str | None = None
        self._content = content
        self._index, self._count = ranks.index, ranks.size
        self._disk = disk
        self._given_up = threading.Event()
        self.ended = threading.Event()
        # not a daemon: the interpreter waits for it at its end
        self._thread = threading.Thread(target=self._run, name="zero_trial-checkpoint", daemon=False)
        self._thread.start()

    def give_up(self) -> None:
        """End as soon as the disk has taken a few megabytes, and leave nothing of this rank's
        thread behind."""
        self._given_up.set()
        if self._content.snapshot is not None:
            self._content.snapshot.give_up()
        self._thread.join()

    @property
    def waited(self) -> float:
        """Return the seconds for which updates waited for copies."""
        return self._content.snapshot.waited if self._content.snapshot is not None else 0.0

    def _run(self) -> None:
        try:
            report = self._write()
            if self._index:
                self._leave(report)
                self.state = _State.WRITTEN
            else:
                self._commit([report, *(self._report_of(rank) for rank in range(1, self._count))])
                self.state = _State.COMMITTED
        except Exception as fault:
            # of the disk, or of what is in the slices: raised on all ranks at their next boundary
            self.fault = _fault_text(fault, self._index, self.folder)
            self.state = _State.FAILED
        finally:
            self.ended.set()
        if self.state is _State.FAILED:
            self._log_unheard()

    def _log_unheard(self) -> None:
        """Wait until the fault is raised, which ends in :meth:`give_up`, or log it when the program
        has ended before: it would leave no other trace."""
        while not self._given_up.wait(_END_SECONDS):
            if not threading.main_thread().is_alive():
                text = "checkpoint %s is not complete: %s The checkpoints before it are untouched."
                log.error(text, self.final, self.fault)
                return

    def _write(self) -> dict[str, Any]:
        content, snapshot = self._content, self._content.snapshot
        if snapshot is None:
            raise CheckpointError(content.fault or "nothing was copied")
        snapshot.finish()  # first, whatever fails: updates wait for it
        json.dumps(content.rank_state, allow_nan=False)
        self._require_going_on()
        more = write_file(self.folder / rank_file(self._index), snapshot.slices, self._disk, self._require_going_on)
        tensors = dict(content.first["tensors"])
        for name, entry in more["tensors"].items():
            before = tensors.get(name, {"pieces": []})
            tensors[name] = {**entry, "pieces": [*before["pieces"], *entry["pieces"]]}
        files = [*content.first["files"], *more["files"]]
        return {"files": files, "tensors": tensors, "rank_state": content.rank_state}

    def _leave(self, report: dict[str, Any]) -> None:
        """Put the report where rank 0 finds it, whole."""
        path = self.folder / _report_name(self._index)
        partial = path.with_suffix(".part")
        self._disk.write(partial, [seal(json.dumps(report, allow_nan=False)).encode()])
        self._disk.rename(partial, path)

    def _report_of(self, rank: int) -> dict[str, Any]:
        path = self.folder / _report_name(rank)
        changed, newest = time.monotonic(), None
        while not path.is_file():
            self._require_going_on()
            if not self.folder.is_dir():
                raise CheckpointError("the folder is gone", where=str(self.folder))
            if not threading.main_thread().is_alive():
                now = _last_change(self.folder)
                if now != newest:
                    changed, newest = time.monotonic(), now
                if time.monotonic() - changed > PATIENCE_SECONDS:
                    raise CheckpointError("a rank does not finish its part", where=str(path), got=f"rank {rank}")
            time.sleep(LOOK_SECONDS)
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def _commit(self, reports: list[dict[str, Any]]) -> None:
        content = self._content
        for rank in range(1, self._count):
            self._disk.remove_file(self.folder / _report_name(rank))
        self._require_going_on()
        commit(self.folder, self.final, reports, content.step, content.state, content.world, self._disk)

    def _require_going_on(self) -> None:
        if self._given_up.is_set():
            raise CheckpointError("the save was given up", where=str(self.final))


def _fault_text(fault: Exception, rank: int, folder: Path) -> str:
    return (
        str(fault) if isinstance(fault, CheckpointError) else f"rank {rank}, {folder}: {type(fault).__name__}: {fault}"
    )


def _report_name(rank: int) -> str:
    return f"rank-{rank:05d}.report"


def _last_change(folder: Path) -> tuple[Any, ...]:
    """Return numbers that change while any rank writes into ``folder``."""
    try:
        return tuple(sorted((path.name, path.stat().st_size) for path in folder.iterdir()))
    except OSError:
        return ()


class BackgroundSaver:
    """The saves of one engine that training does not wait for, at most one at a time. :meth:`save`,
    :meth:`poll` and :meth:`wait` are collective over ``ranks``."""

    def __init__(self, ranks: Ranks, disk: DurableFiles | None = None) -> None:
        self._ranks = ranks
        self._disk = disk or DurableFiles()
        self._buffer = SnapshotBuffer()
        self._save: _BackgroundSave | None = None
        self._waited = 0.0
        self._preparing: threading.Thread | None = None

    @property
    def under_way(self) -> bool:
        """Return whether a save has begun whose end the ranks have not agreed on; the same on all
        ranks."""
        return self._save is not None

    @property
    def waited(self) -> float:
        """Return the seconds for which updates have waited for copies of the last save."""
        return self._save.waited if self._save is not None else self._waited

    @property
    def buffer_bytes(self) -> int:
        """Return the host memory that copies take on this rank, also between saves."""
        return self._buffer.nbytes

    @property
    def prepared(self) -> bool:
        """Return whether memory for copies was asked for."""
        return self._preparing is not None or self._buffer.nbytes > 0

    def prepare(self, nbytes: int, *, pinned: bool = False) -> None:
        """Make the memory for copies in the background, so that the first save does not wait for
        it. Where there is not enough memory none is taken, with a warning; a save asks again.

        Args:
            nbytes: of parameters and state; copies of small things and gaps come on top.
        """

        def reserve() -> None:
            try:
                self._buffer.reserve(nbytes + (nbytes >> 8) + _MARGIN, pinned=pinned)
            except CheckpointError as fault:
                log.warning("%s A checkpoint in the background will fail unless memory becomes free.", fault)

        self._preparing = threading.Thread(target=reserve, name="zero_trial-snapshot", daemon=True)
        self._preparing.start()

    def save(
        self,
        directory: str | Path,
        tag: str,
        slices: Sequence[Slice],
        *,
        later: Sequence[tuple[PartOwner, Sequence[Slice]]] = (),
        on_disk: Sequence[Slice] = (),
        step: int,
        state: Any = None,
        rank_state: Any = None,
        world: Mapping[str, Any] | None = None,
    ) -> Path:
        """Begin to save what all ranks give as ``<directory>/<tag>``; return when ``slices`` are
        copied.

        A save that is under way is waited for. What the background finds wrong, on any rank, is
        raised by :meth:`poll`.

        Args:
            slices: are copied at once.
            later: are copied before their owners write to them.
            on_disk: are written at once, since their memory is a mapped file.
            step: and state, rank_state, world: see :func:`save_checkpoint`.

        Raises CheckpointError on every rank if rank 0 cannot make the folder, or if the save before
        failed.
        """
        self.wait_before_next()
        if self._preparing is not None:
            self._preparing.join()  # it would take away the memory that copies are made into
        final = Path(directory).absolute() / check_tag(tag)  # the program may change its folder
        folder = Path(agree(self._ranks, "checkpoint folder", lambda: str(begin(final, self._disk))))
        content = _Content(step, state, rank_state, world or {})
        try:
            first = write_file(folder / rank_file(self._ranks.index, "-nvme"), on_disk, self._disk)
            content = replace(content, snapshot=self._buffer.take(slices, later), first=first)
        except Exception as fault:  # a full disk, no memory: the other ranks do not know it yet
            content = replace(content, fault=_fault_text(fault, self._ranks.index, folder))
        self._save = _BackgroundSave(folder, final, content, self._ranks, self._disk)
        return final

    def poll(self) -> Path | None:
        """Return the path of a save that has become complete on all ranks since the last call, else
        None. One exchange of an integer per rank.

        Raises CheckpointError on every rank if any rank could not write its part; the checkpoints
        before are untouched.
        """
        save = self._save
        if save is None:
            return None
        states = [row[0] for row in self._ranks.gather_row([int(save.state)], "checkpoint under way")]
        if _State.FAILED in states:
            self._fail(save)
        if states[0] != _State.COMMITTED:
            return None
        self._save, self._waited = None, save.waited
        if self._ranks.index == 0:
            log.info("checkpoint %s is complete; updates waited %.3f s for copies", save.final, save.waited)
        return save.final

    def wait(self) -> Path | None:
        """Wait for the save that is under way and return its path; None without one. Raises like
        :meth:`poll`."""
        while (save := self._save) is not None:
            save.ended.wait(1.0)  # in turns, so that no exchange waits for a whole file
            if (path := self.poll()) is not None:
                return path
        return None

    def wait_before_next(self) -> None:
        """Wait for the save that is under way, with a warning: another one is to begin. Raises like
        :meth:`poll`."""
        if self.under_way:
            if self._ranks.index == 0:
                log.warning("save_checkpoint waits for the one before, which is still being written")
            self.wait()

    def abandon(self) -> None:
        """Give up a save under way, without the other ranks; local. A temporary folder may stay,
        which the next save of that name removes."""
        if self._save is not None:
            self._save.give_up()
            self._save = None

    def close(self) -> None:
        """Wait for the save that is under way and give the memory for copies back, also where
        :meth:`wait` raises."""
        try:
            self.wait()
        finally:
            if self._preparing is not None:
                self._preparing.join()
            self._buffer, self._preparing = SnapshotBuffer(), None

    def _fail(self, save: _BackgroundSave) -> None:
        save.give_up()
        self._save = None
        # also the moment from which no rank writes into the folder any more
        faults = [fault for fault in self._ranks.gather_json(save.fault, "checkpoint faults") if fault is not None]
        if self._ranks.index == 0:
            self._disk.remove_folder(save.folder)
        own = [fault for fault in faults if "given up" not in fault]
        raise CheckpointError(
            "a checkpoint could not be written in the background",
            where=str(save.final),
            got="; ".join(own or faults),
            fix="Free some space or save to another folder; the checkpoints before this one are untouched.",
        )
