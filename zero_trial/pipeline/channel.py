"""Point-to-point channels between pipeline ranks: a value becomes a payload, its description and
bytes, and a value again.

Values are tensors of any dtype in nested tuples, lists and dicts, with None, booleans, numbers and
strings between them. The description is JSON: the same shapes and values have the same text, so
that it is sent once.

    header    8 numbers of 64 bits: kind, chunk, micro-batch, samples, description's number, its
              bytes, payload bytes, state
    text      the description, the first time that it is used; or why the sender failed
    payload   the tensors' bytes

Messages between two ranks arrive in the order of the sends. The next header is requested before it
is needed, so a message moves while its receiver computes; nothing waits for a send before the step
ends. Payloads are counted as ``send``, headers as ``header``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from zero_trial.comm import AxisComm, Message
from zero_trial.comm.diagnosis import FIRST_MESSAGE_TAG
from zero_trial.errors import MeshError, TrialError
from zero_trial.pipeline.schedule import Action, ActionKind

ALIGN = 16  # bytes; every dtype's view starts at a multiple


@dataclass
class Payload:
    """A value with its tensors in order; ``differentiable[i]``: a gradient of tensor i is wanted
    back."""

    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)

    def wanted(self) -> list[torch.Tensor]:
        """Return the tensors whose gradients are wanted."""
        return [tensor for tensor, wanted in zip(self.tensors, self.differentiable, strict=True) if wanted]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, in the order of its description: dicts as they were filled."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same value with each tensor changed, in the order of :func:`tensors_in`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple in a batch
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


class WithLabel(NamedTuple):
    """A layer's output and the label of its micro-batch, which are sent as one tuple."""

    output: Any
    label: Any


def to_payload(value: Any) -> tuple[str, Payload]:
    """Return the description of ``value`` and its tensors. Raises TrialError for a value that
    cannot be sent."""
    payload = Payload(value)
    if isinstance(value, WithLabel):
        places = ("a layer's output", "the label, which is sent with the output")
        node = ["u", [_describe(item, payload, place) for item, place in zip(value, places, strict=True)]]
    else:
        node = _describe(value, payload, "a layer's output")
    return json.dumps(node, separators=(",", ":")), payload


def local_payload(value: Any) -> Payload:
    """Return the payload that a rank receives when ``value`` is sent, without copying the tensors:
    for two adjacent chunks of one rank. Raises TrialError for the same values as
    :func:`to_payload`."""
    text, payload = to_payload(value)
    payload.tensors = [tensor.detach() for tensor in payload.tensors]
    tensors = iter(payload.tensors)
    payload.value = _rebuild(json.loads(text), lambda *_: next(tensors))
    return payload


def _describe(value: Any, payload: Payload, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        payload.tensors.append(value)
        payload.differentiable.append(value.requires_grad)
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), int(value.requires_grad)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["v", value]
    if type(value) in (tuple, list):
        kind = "u" if type(value) is tuple else "l"
        return [kind, [_describe(item, payload, f"{path}[{index}]") for index, item in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, (str, int, bool)) for key in value):
        return ["d", [[key, _describe(item, payload, f"{path}[{key!r}]")] for key, item in value.items()]]
    raise TrialError(
        "this value cannot travel between pipeline stages",
        where=path,
        got=type(value).__name__,
        expected="tensors, None, booleans, numbers and strings in tuples, lists and dicts",
        fix="Put its parts into a tuple, a list or a dict, and build the object from them where it is used.",
    )


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors' bytes (n,) uint8, each at a multiple of ALIGN; a view where there is one
    tensor only. None if there are no bytes."""
    parts = [_bytes(tensor) for tensor in tensors]
    if sum(part.numel() for part in parts) == 0:
        return None
    if len(parts) == 1:
        return parts[0]
    out: list[torch.Tensor] = []
    total = 0
    for part in parts:
        if gap := _aligned(total) - total:
            out.append(part.new_zeros(gap))
        out.append(part)
        total = _aligned(total) + part.numel()
    return torch.cat(out)


def unpack(text: str, raw: torch.Tensor | None, device: torch.device) -> Payload:
    """Rebuild the value; its tensors share the memory of ``raw`` (n,) uint8, which starts a
    storage."""
    payload = Payload(None)
    offset = 0

    def view(dtype: torch.dtype, shape: Sequence[int], wanted: bool) -> torch.Tensor:
        nonlocal offset
        size = prod(shape) * dtype.itemsize
        offset = _aligned(offset)
        if size == 0 or raw is None:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            # No view: autograd lets a layer work in place on it.
            tensor = torch.empty(0, dtype=dtype, device=device)
            tensor.set_(raw.untyped_storage(), offset // dtype.itemsize, tuple(shape))  # type: ignore[call-overload]
        offset += size
        payload.tensors.append(tensor)
        payload.differentiable.append(wanted)
        return tensor

    payload.value = _rebuild(json.loads(text), view)
    return payload


def _rebuild(node: Any, make: Callable[[torch.dtype, Sequence[int], bool], Any]) -> Any:
    kind = node[0]
    if kind == "t":
        return make(getattr(torch, node[1]), node[2], bool(node[3]))
    if kind == "v":
        return node[1]
    if kind == "d":
        return {key: _rebuild(item, make) for key, item in node[1]}
    items = [_rebuild(item, make) for item in node[1]]
    return tuple(items) if kind == "u" else items


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


# --- messages -------------------------------------------------------------------------------------

HEADER = 8  # numbers of 64 bits
GOES_ON, FAILED = 0, 1  # the header's state
LINGER_SECONDS = 2.0
# beyond that (values that change with each micro-batch) a description goes with its message
KNOWN_DESCRIPTIONS = 256

_KINDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def message_tags(channel: int, number: int) -> int:
    """Return the tag of a channel's message: never a collective's, and another one for another
    engine."""
    return FIRST_MESSAGE_TAG + (number % 16 << 11) | channel & 0x7FF


class PeerFailed(MeshError):
    """Another pipeline rank failed in its part of the step; the text is its error."""


class SendChannel:
    """Sends from this rank to pipeline rank ``to``."""

    def __init__(self, comm: AxisComm, to: int, channel: int) -> None:
        self._comm = comm
        self._to = to
        self._channel = channel
        self._count = 0
        self._known: dict[str, int] = {}
        self._under_way: deque[Message] = deque()

    def send(self, action: Action, value: object, samples: int) -> None:
        """Start to send ``value``; does not wait. The tensors must stay as they are until
        :meth:`finish`."""
        text, payload = to_payload(value)
        number = self._known.get(text, 0)
        new = number == 0
        if new and len(self._known) < KNOWN_DESCRIPTIONS:
            number = self._known[text] = len(self._known) + 1
        data = text.encode() if new else b""
        raw = pack(payload.tensors)
        size = raw.numel() if raw is not None else 0
        self._header(
            [
                *(_KINDS.index(action.kind), action.chunk, action.micro_batch),
                *(samples, number, len(data), size, GOES_ON),
            ],
            str(action),
        )
        if data:
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), str(action))
        if raw is not None:
            self._post(raw, str(action), counted=True)
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()

    def fail(self, why: str) -> None:
        """Send the error ``why`` in place of the message that the other rank waits for. Does not
        wait: :meth:`linger` does, a little."""
        data = why.encode()[:4000]
        try:
            self._header([0, 0, 0, 0, 0, len(data), 0, FAILED], "failure")
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), "failure")
        except MeshError:
            self._under_way.clear()  # the other rank is gone and needs no error

    def linger(self, timeout: float = LINGER_SECONDS) -> None:
        """Wait at most ``timeout`` seconds for messages under way; a rank that never receives them
        is not waited for."""
        end = time.monotonic() + timeout
        while self._under_way and time.monotonic() < end:
            if self._under_way[0].done:
                self._under_way.popleft()
            else:
                time.sleep(0.01)
        self._under_way.clear()

    def finish(self) -> None:
        """Wait until everything has left."""
        while self._under_way:
            self._under_way.popleft().wait()

    def _header(self, numbers: list[int], label: str) -> None:
        self._comm.counters.add("header", self._comm.name, HEADER, 8)
        self._post(torch.tensor(numbers, dtype=torch.int64), label)

    def _post(self, values: torch.Tensor, label: str, *, counted: bool = False) -> None:
        tag = message_tags(self._channel, self._count)
        self._count += 1
        self._under_way.append(self._comm.send(values, self._to, label, tag, counted=counted))


class ReceiveChannel:
    """Receives on this rank from pipeline rank ``source``; tensors come to ``device``."""

    def __init__(self, comm: AxisComm, source: int, channel: int, device: torch.device) -> None:
        self._comm = comm
        self._source = source
        self._channel = channel
        self._device = device
        self._count = 0
        self._known: dict[int, str] = {}
        self._next: Message | None = None
        self._expected = 0

    def prepare(self, messages: int) -> None:
        """Prepare for ``messages`` messages in this step; the first header is requested now."""
        self._expected = messages
        self._request_header()

    def take(self, action: Action) -> tuple[Payload, int]:
        """Return the next message, which must be that of the receive ``action``, and how many
        samples its micro-batch has. Raises PeerFailed, or MeshError for another message."""
        if self._next is None:
            self._expected = max(self._expected, 1)
            self._request_header()
        header, self._next = self._next, None
        if header is None:
            raise MeshError("no message is expected", where=str(action))
        kind, chunk, micro_batch, samples, number, length, size, state = header.wait().tolist()
        text = self._text(number, length, str(action))
        if state == FAILED:
            raise PeerFailed(text)
        if (sent := Action(_KINDS[kind], chunk, micro_batch)) != action.other_end:
            raise MeshError(
                "the next message is not the one that the schedule expects",
                where=f"{action} from rank {self._comm.ranks[self._source]}",
                got=sent,
                fix="All pipeline ranks must run the same schedule.",
            )
        raw = None
        if size:
            raw = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._receive(raw, str(action)).wait()
        self._request_header()
        return unpack(text, raw, self._device), samples

    def _request_header(self) -> None:
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
