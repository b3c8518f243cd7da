"""Save a checkpoint while training continues.

    call            rank 0 creates the temporary folder; each rank writes its states on NVMe into a
                    separate file, and copies values that user code can change into host memory
    background      each rank copies masters and optimizer state, tensor by tensor, in the order in
                    which parts are updated, and writes all copies, with SHA-256; ranks other than 0
                    leave a report next to their file. Rank 0 waits for the reports, writes the
                    manifest and renames the folder
    an update       waits until the part that it changes is copied: masters and optimizer state of a
                    group of parameters, which are changed together
    step boundary   one exchange of one integer per rank, only while a save is running: all ranks
                    learn at the same step that it is complete, or that it failed

The commit needs no collective, since all ranks see the same folder. So a save also completes while
the interpreters exit, which wait for their threads.

Host memory: the bytes that a rank writes, except its states on NVMe. With Adam that is 12/N per
parameter in fp32 (parameters and two moments) and in 16 bits (masters and moments), N ranks on the
shard axis; at stage 0 the first rank has 12, the others none. Pinned where tensors are on a device.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.format import Slice, check_tag
from zero_trial.checkpoint.writer import (
    DurableFiles,
    Ranks,
    agree,
    begin,
    commit,
    fault_text,
    rank_file,
    write_file,
)
from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import CheckpointError
from zero_trial.util.memory import available_memory
from zero_trial.util.text import format_bytes

# --- copies in host memory ------------------------------------------------------------------------


_ALIGNED = 64  # bytes: copies of tensors begin at multiples of this

Hold = Callable[[Callable[[], None]], None]
"""Accepts the callback that must run once before the next write to the tensors of a part."""


class _Part(NamedTuple):
    """Tensors copied together: (target, source) still to copy, and the event after the last."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    copied: threading.Event


class Snapshot:
    """Copies of slices as of the snapshot's creation; see the top of this file.

    Attributes:
        slices: with copies as their tensors. They hold the values after :meth:`finish`.
        waited: seconds for which writes were delayed.
        given_up: copy no tensor after the one in flight, which is the last that writes wait for.
    """

    def __init__(self, slices: Sequence[Slice], parts: Sequence[_Part], stream: torch.Stream | None) -> None:
        self.slices = slices
        self.waited = 0.0
        self.given_up = False
        self._parts, self._stream = parts, stream

    def wait_for(self, part: int) -> None:
        """Wait until no source of ``part`` is needed anymore."""
        begin = time.perf_counter()
        self._parts[part].copied.wait()
        self.waited += time.perf_counter() - begin

    def finish(self) -> None:
        """Copy the parts in order. Exactly one thread must call this: updates wait for it."""
        stream = self._stream
        try:
            with torch_module(stream.device).stream(stream) if stream is not None else nullcontext():
                # In the order of the update, so that the first group waits least.
                for part in self._parts:
                    while part.copies and not self.given_up:
                        _copy(*part.copies.pop(0))
                    part.copied.set()
        finally:  # an update must not wait for a thread that has failed
            for part in self._parts:
                part.copied.set()


class SnapshotBuffer:
    """Host memory for copies of a rank's slices, kept from save to save."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._area.numel()

    def _reserve(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Reserve ``nbytes``. Raises CheckpointError if the machine, or our control group, has less
        memory left: the kernel would kill a process."""
        if nbytes > self._area.numel():
            self._area = torch.empty(0, dtype=torch.uint8)  # first free the area that is too small
            left = available_memory()
            if left is not None and nbytes > left:
                raise CheckpointError(
                    "not enough memory for the copies of a background checkpoint",
                    where="checkpoint.writer.decoupled",
                    got=f"{format_bytes(max(left, 0))} left on this machine or in this process's control group",
                    expected=f"{format_bytes(nbytes)} for this rank",
                    fix="Give the ranks more memory, or save with asynchronous=False.",
                )
            # touch the pages now, so that ranks that check later see the memory that is left
            self._area = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._area

    def take(self, slices: Sequence[Slice], later: Sequence[tuple[Hold, Sequence[Slice]]] = ()) -> Snapshot:
        """Copy ``slices``, and begin a snapshot of them and of the parts ``later``, whose writers
        must wait. :meth:`Snapshot.finish` must follow, in another thread."""
        everything = [*slices, *(part for _, own in later for part in own)]
        ends = list(accumulate((-(-part.tensor.nbytes // _ALIGNED) * _ALIGNED for part in everything), initial=0))
        devices = [part.tensor.device for part in everything if is_accelerator(part.tensor.device)]
        area = self._reserve(ends[-1], pinned=bool(devices))
        copied = [
            replace(part, tensor=area[offset : offset + part.tensor.nbytes].view(part.dtype))
            for part, offset in zip(everything, ends, strict=False)
        ]
        pairs = ((target.tensor, source.flat) for target, source in zip(copied, everything, strict=True))
        for target, source in islice(pairs, len(slices)):
            _copy(target, source)
        stream: Any = None
        if devices:  # a separate stream, after all enqueued work: copies do not wait for the next forward
            stream = torch_module(devices[0]).Stream(devices[0])
            stream.wait_stream(torch_module(devices[0]).current_stream(devices[0]))
        parts = [_Part(list(islice(pairs, len(own))), threading.Event()) for _, own in later]
        snapshot = Snapshot(copied, parts, stream)
        for index, (hold, _) in enumerate(later):
            hold(partial(snapshot.wait_for, index))
        return snapshot


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into host memory. memmove releases the GIL and stays on this thread; torch's copy
    between host tensors waits for its thread pool at the end of every tensor: 16 ms on a busy
    machine."""
    if source.is_cpu:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


log = logging.getLogger("zero_trial")

_LOOK_SECONDS = 0.02  # interval at which rank 0 looks for the reports of other ranks
_PATIENCE_SECONDS = 30.0
"""How long rank 0 waits for the others' reports after its own program has ended, counted from the
last change of any file: their programs may have been killed."""

# The progress of a rank's part of a save. Rank 0 is done when the checkpoint is complete.
_WRITING, _DONE, _FAILED = range(3)


class _BackgroundSave:
    """This rank's part of one running save: a thread that writes, and its progress.

    Attributes:
        fault: why this rank's part has failed.
        waited: seconds for which updates waited for copies.
    """

    def __init__(self, folder: Path, final: Path, ranks: Ranks, disk: DurableFiles) -> None:
        self.folder, self.final = folder, final
        self.state = _WRITING
        self.fault: str | None = None
        self._snapshot: Snapshot | None = None
        self._index, self._count = ranks.index, ranks.size
        self._disk = disk
        self._given_up = threading.Event()
        self.thread = threading.Thread()

    def start(
        self,
        snapshot: Snapshot,
        first: Mapping[str, Any],
        rank_state: Any,
        commit: Callable[[Sequence[Mapping[str, Any]]], str],
    ) -> None:
        """Write the snapshot in a thread. ``first``: the report of files already written."""
        self._snapshot = snapshot
        arguments = (snapshot, first, rank_state, commit)
        # not a daemon: the interpreter waits for it at exit
        self.thread = threading.Thread(target=self._run, args=arguments, name="zero_trial-checkpoint", daemon=False)
        self.thread.start()

    def fail(self, fault: Exception) -> None:
        """Note why this rank's part has failed: raised on all ranks at their next boundary."""
        self.fault = fault_text(fault, f"rank {self._index}, {self.folder}")
        self.state = _FAILED
        if not self._given_up.is_set():  # the program may end before the boundary
            log.error("checkpoint %s is not complete: %s Earlier checkpoints are unaffected.", self.final, self.fault)

    def give_up(self) -> None:
        """Stop within a few megabytes of writing, and wait until this rank's thread has ended."""
        self._given_up.set()
        if self._snapshot is not None:
            self._snapshot.given_up = True
            self.thread.join()

    @property
    def waited(self) -> float:
        return self._snapshot.waited if self._snapshot is not None else 0.0

    def _run(self, snapshot: Snapshot, first: Mapping[str, Any], rank_state: Any, commit: Callable[..., str]) -> None:
        try:
            snapshot.finish()  # first, whatever fails: updates wait for it
            self._require_going_on()
            more = write_file(self.folder / rank_file(self._index), snapshot.slices, self._disk, self._require_going_on)
            report = json.dumps({**_joined(first, more), "rank_state": rank_state}, allow_nan=False)
            if self._index:
                # rename it once it is complete
                path = self.folder / _report_name(self._index)
                self._disk.write(path.with_suffix(".part"), [report.encode()])
                self._disk.rename(path.with_suffix(".part"), path)
            else:
                reports = [json.loads(report), *(self._report_of(rank) for rank in range(1, self._count))]
                for rank in range(1, self._count):
                    self._disk.remove_file(self.folder / _report_name(rank))
                self._require_going_on()
                commit(reports)
            self.state = _DONE
        except Exception as fault:  # a disk error, or an error in the slices' content
            self.fail(fault)

    def _report_of(self, rank: int) -> dict[str, Any]:
        path = self.folder / _report_name(rank)
        while not path.is_file():
            self._require_going_on()
            if not self.folder.is_dir():
                raise CheckpointError("the folder is gone", where=str(self.folder))
            ended = not threading.main_thread().is_alive()
            if ended and time.time() - _last_change(self.folder) > _PATIENCE_SECONDS:
                raise CheckpointError("a rank did not finish its part", where=str(path), got=f"rank {rank}")
            time.sleep(_LOOK_SECONDS)
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def _require_going_on(self) -> None:
        if self._given_up.is_set():
            raise CheckpointError("the save was cancelled", where=str(self.final))


def _joined(first: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Join the reports of two files of one rank."""
    tensors = dict(first["tensors"])
    for name, entry in more["tensors"].items():
        before = tensors.get(name, {"pieces": []})
        tensors[name] = {**entry, "pieces": [*before["pieces"], *entry["pieces"]]}
    return {"files": [*first["files"], *more["files"]], "tensors": tensors}


def _last_change(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it is changing
        return time.time()


def _report_name(rank: int) -> str:
    return f"rank-{rank:05d}.report"


class BackgroundSaver:
    """The background saves of one engine, at most one at a time. :meth:`save`, :meth:`poll` and
    :meth:`wait` are collective over ``ranks``.

    Attributes:
        current: the save that has begun and whose end the ranks have not agreed on; it exists on
            all ranks, or on none.
    """

    def __init__(self, ranks: Ranks, disk: DurableFiles | None = None) -> None:
        self._ranks = ranks
        self._disk = disk or DurableFiles()
        self._buffer = SnapshotBuffer()
        self.current: _BackgroundSave | None = None
        self._waited = 0.0

    @property
    def waited(self) -> float:
        """Return the seconds for which updates have waited for copies of the last save."""
        return self.current.waited if self.current is not None else self._waited

    def save(
        self,
        directory: str | Path,
        tag: str,
        slices: Sequence[Slice],
        *,
        later: Sequence[tuple[Hold, Sequence[Slice]]] = (),
        on_disk: Sequence[Slice] = (),
        step: int,
        state: Any = None,
        rank_state: Any = None,
        world: Mapping[str, Any] | None = None,
    ) -> Path:
        """Begin to save the slices of all ranks as ``<directory>/<tag>``; return when ``slices``
        are copied.

        First waits for a running save. :meth:`poll` raises errors of the background, on any rank.

        Args:
            slices: copied at once.
            later: copied before their next change.
            on_disk: written at once, since their memory is a mapped file.
            step: and state, rank_state, world: see :func:`save_checkpoint`.

        Raises CheckpointError on every rank if rank 0 cannot create the folder, or if the previous
        save failed.
        """
        if self.current is not None:
            if self._ranks.index == 0:
                log.warning("save_checkpoint waits for the previous checkpoint, which is still being written")
            self.wait()
        final = Path(directory).absolute() / check_tag(tag)  # the program may change its working directory
        folder = Path(agree(self._ranks, final, "checkpoint folder", lambda: str(begin(final, self._disk))))
        save = _BackgroundSave(folder, final, self._ranks, self._disk)
        try:
            first = write_file(folder / rank_file(self._ranks.index, "-nvme"), on_disk, self._disk)
            snapshot = self._buffer.take(slices, later)
        except Exception as fault:  # a full disk, no memory: the other ranks do not know yet
            save.fail(fault)
        else:
            last = partial(commit, folder, final, step=step, state=state, world=world or {}, disk=self._disk)
            save.start(snapshot, first, rank_state, last)
        self.current = save
        return final

    def poll(self) -> Path | None:
        """Return the path of a save that was completed on all ranks since the last call, else None.
        One exchange of an integer per rank.

        Raises CheckpointError on every rank if any rank could not write its part; earlier
        checkpoints are untouched.
        """
        save = self.current
        if save is None:
            return None
        states = [row[0] for row in self._ranks.gather_row([save.state], "checkpoint under way")]
        if _FAILED in states:
            self._fail(save)
        if states[0] != _DONE:
            return None
        self.current, self._waited = None, save.waited
        if self._ranks.index == 0:
            log.info("checkpoint %s is complete; updates waited %.3f s for copies", save.final, save.waited)
        return save.final

    def wait(self) -> Path | None:
        """Wait for the running save; return its path, or None. Raises like :meth:`poll`."""
        while (save := self.current) is not None:
            if save.state == _WRITING:
                save.thread.join(0.2)  # in turns, so that no exchange waits for a whole file
            if (path := self.poll()) is not None:
                return path
        return None

    def abandon(self) -> None:
        """Abort a running save, without the other ranks; local. A temporary folder may remain,
        which the next save of that name removes."""
        if self.current is not None:
            self.current.give_up()
            self.current = None

    def close(self) -> None:
        """Wait for the running save; free the memory for copies even if it raises."""
        try:
            self.wait()
        finally:
            self._buffer = SnapshotBuffer()

    def _fail(self, save: _BackgroundSave) -> None:
        save.give_up()
        self.current = None
        # from this moment on, no rank writes into the folder anymore
        faults = [fault for fault in self._ranks.gather_json(save.fault, "checkpoint faults") if fault is not None]
        if self._ranks.index == 0:
            self._disk.remove_folder(save.folder)
        own = [fault for fault in faults if "given up" not in fault]
        raise CheckpointError(
            "a checkpoint could not be written in the background",
            where=str(save.final),
            got="; ".join(own or faults),
            fix="Free some space or save to another folder; earlier checkpoints are unaffected.",
        )
