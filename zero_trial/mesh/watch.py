"""How a rank waits on one axis: where it stands is on the board, time is bounded, and silence becomes an error that names who is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch

from zero_trial.mesh.board import Board
from zero_trial.mesh.diagnosis import explain


class Watch:
    """Waits for works among ``ranks`` for at most ``timeout`` seconds."""

    def __init__(self, board: Board, ranks: tuple[int, ...], timeout: float) -> None:
        self.board = board
        self.ranks = ranks
        self.timeout = timeout

    @staticmethod
    def on_host(values: torch.Tensor) -> bool:
        """Whether ``values`` are in the host's memory. A collective of any others runs on their device, in the order of its streams."""
        return values.device.type == "cpu"

    def wait(self, work: Any, name: str, among: tuple[int, ...] | None = None, *, on_host: bool = True) -> None:
        """Waits for ``work`` (of torch.distributed, or waited for like one). Raises MeshError, about ``among`` or all ranks.

        ``on_host``: what :meth:`on_host` says of its tensors. Then the work is done when this returns; otherwise what this rank
        launches next comes after it on the device, and the host goes on.
        """
        self.board.waiting(name)
        try:
            if on_host:
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # with a time limit NCCL would block the host; its own watchdog bounds the work
        except (RuntimeError, OSError) as error:
            self.fail(name, error, among)
        self.board.leave()

    def fail(self, name: str, error: Exception, among: tuple[int, ...] | None = None) -> NoReturn:
        """Raises the MeshError that ``error`` in operation ``name`` means."""
        raise explain(self.board, among or self.ranks, name, error, self.timeout) from error
