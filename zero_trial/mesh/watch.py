"""How a rank waits on one axis: where it stands is on the board, time is bounded, and silence becomes an error that names who is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

from zero_trial.mesh.board import Board
from zero_trial.mesh.diagnosis import explain


class Watch:
    """Waits for works among ``ranks`` for at most ``timeout`` seconds. ``on_cpu``: the group's backend blocks until a work is done."""

    def __init__(self, board: Board, ranks: tuple[int, ...], timeout: float, on_cpu: bool) -> None:
        self.board = board
        self.ranks = ranks
        self.timeout = timeout
        self._on_cpu = on_cpu

    def wait(self, work: Any, name: str, among: tuple[int, ...] | None = None) -> None:
        """Returns when ``work`` (of torch.distributed, or waited for like one) is done. Raises MeshError, about ``among`` or all ranks."""
        self.board.waiting(name)
        try:
            if self._on_cpu:
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # on CUDA this orders streams and does not block; NCCL's watchdog bounds it
        except (RuntimeError, OSError) as error:
            self.fail(name, error, among)
        self.board.leave()

    def fail(self, name: str, error: Exception, among: tuple[int, ...] | None = None) -> NoReturn:
        """Raises the MeshError that ``error`` in operation ``name`` means."""
        raise explain(self.board, among or self.ranks, name, error, self.timeout) from error
