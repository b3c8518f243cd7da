"""Channels: messages from one pipeline rank to another, each with a header that says what it is.

    header    8 numbers of 64 bits: kind, chunk, micro-batch, samples, description's number, its bytes, payload bytes, state
    text      the description, the first time that it is used; or why the sender failed
    payload   the tensors' bytes

Messages between two ranks arrive in the order of the sends. The next header is asked for before it is needed, so a message moves while its
receiver computes; nothing waits for a send before the step ends. Counted are payloads as ``send``, headers as ``header``.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from zero_trial.errors import MeshError
from zero_trial.mesh import AxisComm, Message
from zero_trial.pipeline.actions import Action, Kind
from zero_trial.pipeline.parcel import Parcel, pack, parcel_of, unpack

HEADER = 8
HEADER_BYTES = 8 * HEADER
GOES_ON, FAILED = 0, 1
PATIENCE_SECONDS = 2.0
KNOWN_DESCRIPTIONS = 256  # beyond that (values that change with each micro-batch) a description goes with its message
_KINDS = {Kind.SEND_F: 0, Kind.SEND_B: 1, Kind.RECV_F: 0, Kind.RECV_B: 1}
_LAST_TAGS = 0xFFFFF  # collectives count up from 0 in these 20 bits; messages keep to the last 16 values


def message_tags(channel: int, number: int) -> int:
    """The tag of a channel's message: never a collective's (before a million of them), and another one for another engine."""
    return (_LAST_TAGS - number % 16) << 11 | channel & 0x7FF


class PeerFailed(MeshError):
    """Another pipeline rank failed in its part of the step, and said why."""


@dataclass(frozen=True)
class Arrival:
    """What came: the parcel, and how many samples its micro-batch has."""

    parcel: Parcel
    samples: int


class Outbox:
    """What this rank sends to pipeline rank ``to``."""

    def __init__(self, comm: AxisComm, to: int, channel: int) -> None:
        self._comm = comm
        self._to = to
        self._channel = channel
        self._count = 0
        self._known: dict[str, int] = {}
        self._under_way: deque[Message] = deque()

    def send(self, action: Action, value: object, samples: int) -> None:
        """Starts to send ``value``; does not wait. The tensors must stay as they are until :meth:`finish`."""
        text, parcel = parcel_of(value)
        number = self._known.get(text, 0)
        new = number == 0
        if new and len(self._known) < KNOWN_DESCRIPTIONS:
            number = self._known[text] = len(self._known) + 1
        data = text.encode() if new else b""
        payload = pack(parcel.tensors)
        size = payload.numel() if payload is not None else 0
        self._header(
            [_KINDS[action.kind], action.chunk, action.micro_batch, samples, number, len(data), size, GOES_ON],
            str(action),
        )
        if data:
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), str(action))
        if payload is not None:
            self._post(payload, str(action), counted=True)
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()

    def fail(self, why: str) -> None:
        """Tells the other rank, instead of what it waits for, that nothing will come. Does not wait: :meth:`linger` does, a little."""
        data = why.encode()[:4000]
        try:
            self._header([0, 0, 0, 0, 0, len(data), 0, FAILED], "failure")
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), "failure")
        except MeshError:
            self._under_way.clear()  # the other rank is gone: it needs no news

    def linger(self, patience: float = PATIENCE_SECONDS) -> None:
        """Gives what is under way at most ``patience`` seconds to leave; a rank that never asks for it is not waited for."""
        end = time.monotonic() + patience
        while self._under_way and time.monotonic() < end:
            if self._under_way[0].done:
                self._under_way.popleft()
            else:
                time.sleep(0.01)
        self._under_way.clear()

    def finish(self) -> None:
        """Returns when everything has left."""
        while self._under_way:
            self._under_way.popleft().wait()

    def _header(self, numbers: list[int], label: str) -> None:
        self._comm.counters.add("header", self._comm.name, HEADER, 8)
        self._post(torch.tensor(numbers, dtype=torch.int64), label)

    def _post(self, values: torch.Tensor, label: str, *, counted: bool = False) -> None:
        tag = message_tags(self._channel, self._count)
        self._count += 1
        self._under_way.append(self._comm.send(values, self._to, label, tag, counted=counted))


class Inbox:
    """What this rank receives from pipeline rank ``source``; tensors come to ``device``."""

    def __init__(self, comm: AxisComm, source: int, channel: int, device: torch.device) -> None:
        self._comm = comm
        self._source = source
        self._channel = channel
        self._device = device
        self._count = 0
        self._known: dict[int, str] = {}
        self._next: Message | None = None
        self._expected = 0

    def expect(self, messages: int) -> None:
        """So many messages will come in this step; the first header is asked for now."""
        self._expected = messages
        self._ask()

    def take(self, action: Action) -> Arrival:
        """The next message, which must be that of the receive ``action``. Raises PeerFailed, or MeshError for another message."""
        if self._next is None:
            self._expected = max(self._expected, 1)
            self._ask()
        header, self._next = self._next, None
        if header is None:
            raise MeshError("no message is expected", where=str(action))
        kind, chunk, micro_batch, samples, number, length, size, state = header.wait().tolist()
        text = self._text(number, length, str(action))
        if state == FAILED:
            raise PeerFailed(text)
        if (kind, chunk, micro_batch) != (
            _KINDS[action.kind],
            action.chunk + (-1 if kind == 0 else 1),
            action.micro_batch,
        ):
            raise MeshError(
                "another message than the schedule's came",
                where=f"{action} from rank {self._comm.ranks[self._source]}",
                got=f"{'FB'[kind]} of chunk {chunk}, micro-batch {micro_batch}",
                fix="All pipeline ranks must run the same schedule.",
            )
        payload = None
        if size:
            payload = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._receive(payload, str(action)).wait()
        self._ask()
        return Arrival(unpack(text, payload, self._device), samples)

    def _ask(self) -> None:
        if self._expected > 0 and self._next is None:
            self._expected -= 1
            self._next = self._receive(torch.empty(HEADER, dtype=torch.int64), "header")

    def _text(self, number: int, length: int, label: str) -> str:
        if not length:
            return self._known[number]
        data = torch.empty(length, dtype=torch.uint8)
        self._receive(data, label).wait()
        text = bytes(data.tolist()).decode()
        if number:
            self._known[number] = text
        return text

    def _receive(self, values: torch.Tensor, label: str) -> Message:
        tag = message_tags(self._channel, self._count)
        self._count += 1
        return self._comm.receive(values, self._source, label, tag)
