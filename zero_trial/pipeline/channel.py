"""Point-to-point channels between pipeline ranks: a value is sent as a description and bytes, and
rebuilt by the receiver.

Values are tensors of any dtype, None, booleans, numbers and strings, in tuples, lists, dicts and
any other container that torch's pytree can describe.

    header    HEADER bytes: the length of the note, which is JSON, and the note or its beginning
    note      the rest of a long note. It has the action, the samples, the payload's bytes and the
              value's description; or the sender's error
    payload   the tensors' bytes

Messages between two ranks arrive in the order of the sends. The next header is requested before it
is needed, so a message is transferred while its receiver computes; no rank waits for a send before
the step ends. Payloads are counted as ``send``, headers as ``header``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from zero_trial.comm import AxisComm, Message
from zero_trial.comm.waits import FIRST_MESSAGE_TAG
from zero_trial.errors import MeshError, TrialError
from zero_trial.pipeline.schedule import Action, ActionKind

ALIGN = 16  # bytes; alignment of each tensor, valid for a view of any dtype


@dataclass
class Payload:
    """A value and its tensors in order. If ``differentiable[i]``, tensor i needs a gradient."""

    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)

    def wanted(self) -> list[torch.Tensor]:
        """Return the tensors that need gradients."""
        return [tensor for tensor, wanted in zip(self.tensors, self.differentiable, strict=True) if wanted]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in the order of its description (dicts: insertion order)."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class WithLabel(NamedTuple):
    """A layer's output and the label of its micro-batch, sent as one tuple."""

    output: Any
    label: Any


_spec_text = lru_cache(maxsize=256)(treespec_dumps)


def _no_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) is not tuple


def to_payload(value: Any) -> tuple[str, Payload]:
    """Return ``value`` as JSON and its tensors. Raises TrialError if it cannot be sent."""
    payload = Payload(value)
    leaves, spec = tree_flatten(tuple(value) if isinstance(value, WithLabel) else value, is_leaf=_no_plain_tuple)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            payload.tensors.append(leaf)
            payload.differentiable.append(leaf.requires_grad)
            leaves[index] = [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            raise _not_sent(value, leaf)
    return json.dumps([_spec_text(spec), leaves]), payload


def local_payload(value: Any) -> Payload:
    """Return the payload that a receiver of ``value`` would get, without copying the tensors: for
    two adjacent chunks on one rank. Raises TrialError for the same values as :func:`to_payload`."""
    _, payload = to_payload(value)
    payload.tensors = [tensor.detach() for tensor in payload.tensors]
    tensors = iter(payload.tensors)
    payload.value = tree_map_only(torch.Tensor, lambda _: next(tensors), value)
    return payload


def _not_sent(value: Any, leaf: Any) -> TrialError:
    """Return the error for a leaf that cannot be sent."""
    places = {"a layer's output": value}
    if isinstance(value, WithLabel):
        places = {"a layer's output": value.output, "the label, which is sent with the output": value.label}
    found = {name: tree_flatten_with_path(part, is_leaf=_no_plain_tuple)[0] for name, part in places.items()}
    place, path = next((name, path) for name, pairs in found.items() for path, each in pairs if each is leaf)
    return TrialError(
        "this value cannot be sent between pipeline stages",
        where=f"{place}{keystr(path)}",
        got=type(leaf).__name__,
        expected="tensors, None, booleans, numbers and strings in tuples, lists and dicts",
        fix="Put its parts into a tuple, a list or a dict, and build the object from them at the receiver.",
    )


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors' bytes (n,) uint8, each at a multiple of ALIGN; a view if there is only
    one tensor. None if there are no bytes."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    if sum(part.numel() for part in parts) == 0:
        return None
    if len(parts) == 1:
        return parts[0]
    return torch.cat([each for part in parts for each in (part, part.new_zeros(-part.numel() % ALIGN))])


def unpack(description: str, raw: torch.Tensor | None, device: torch.device) -> Payload:
    """Rebuild the value; its tensors share the memory of ``raw`` (n,) uint8."""
    spec, leaves = json.loads(description)
    payload = Payload(None)
    offset = 0
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, list):
            continue
        dtype, shape, wanted = getattr(torch, leaf[0]), leaf[1], leaf[2]
        size = prod(shape) * dtype.itemsize
        if size == 0 or raw is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            # Not a view, so that autograd allows in-place changes by a layer.
            tensor = torch.empty(0, dtype=dtype, device=device)
            tensor.set_(raw.untyped_storage(), offset // dtype.itemsize, shape)  # type: ignore[call-overload]
        offset += size + -size % ALIGN
        leaves[index] = tensor
        payload.tensors.append(tensor)
        payload.differentiable.append(wanted)
    payload.value = tree_unflatten(leaves, treespec_loads(spec))
    return payload


# --- messages -------------------------------------------------------------------------------------

HEADER = 1024  # bytes
_LENGTH = 8  # bytes of the header for the length of the note
LINGER_SECONDS = 2.0


def message_tags(channel: int, number: int) -> int:
    """Return a tag for a channel's message that no collective or other engine uses."""
    return FIRST_MESSAGE_TAG + (number % 16 << 11) | channel & 0x7FF


class PeerFailed(MeshError):
    """Another pipeline rank failed in its part of the step; the message is that rank's error."""


class SendChannel:
    """Sends from this rank to pipeline rank ``to``."""

    def __init__(self, comm: AxisComm, to: int, channel: int) -> None:
        self._comm = comm
        self._to = to
        self._channel = channel
        self._count = 0
        self._under_way: deque[Message] = deque()

    def send(self, action: Action, value: object, samples: int) -> None:
        """Start sending ``value``. Its tensors must not change until :meth:`finish`."""
        description, payload = to_payload(value)
        raw = pack(payload.tensors)
        size = raw.numel() if raw is not None else 0
        self._announce((None, tuple(action), samples, size, description), str(action))
        if raw is not None:
            self._post(raw, str(action), counted=True)
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()

    def fail(self, why: str) -> None:
        """Send the error ``why`` instead of the message that the other rank waits for. Does not
        wait; :meth:`linger` waits briefly."""
        try:
            self._announce((why[:4000],), "failure")
        except MeshError:
            self._under_way.clear()  # the other rank is gone and needs no error

    def linger(self) -> None:
        """Wait at most ``LINGER_SECONDS`` for messages in flight."""
        end = time.monotonic() + LINGER_SECONDS
        while self._under_way and time.monotonic() < end:
            if self._under_way[0].done:
                self._under_way.popleft()
            else:
                time.sleep(0.01)
        self._under_way.clear()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._under_way:
            self._under_way.popleft().wait()

    def _announce(self, facts: tuple[Any, ...], label: str) -> None:
        note = json.dumps(facts).encode()
        data = len(note).to_bytes(_LENGTH, "little") + note
        self._comm.counters.add("header", self._comm.name, HEADER, 1)
        for part in (data[:HEADER].ljust(HEADER, b"\0"), data[HEADER:]):
            if part:
                self._post(torch.frombuffer(bytearray(part), dtype=torch.uint8), label)

    def _post(self, values: torch.Tensor, label: str, *, counted: bool = False) -> None:
        tag = message_tags(self._channel, self._count)
        self._count += 1
        self._under_way.append(self._comm.send(values, self._to, label, tag, counted=counted))


class ReceiveChannel:
    """Receives on this rank from pipeline rank ``source``; tensors are put on ``device``."""

    def __init__(self, comm: AxisComm, source: int, channel: int, device: torch.device) -> None:
        self._comm = comm
        self._source = source
        self._channel = channel
        self._device = device
        self._count = 0
        self._next: Message | None = None
        self._expected = 0

    def prepare(self, messages: int) -> None:
        """Prepare for ``messages`` messages in this step; request the first header now."""
        self._expected = messages
        self._request_header()

    def take(self, action: Action) -> tuple[Payload, int]:
        """Return the next message, which must match the receive ``action``, and the samples of its
        micro-batch. Raises PeerFailed, or MeshError for any other message."""
        if self._next is None:
            self._expected = max(self._expected, 1)
            self._request_header()
        header, self._next = self._next, None
        if header is None:
            raise MeshError("no message is expected", where=str(action))
        why, *facts = self._note(header.wait(), str(action))
        if why is not None:
            raise PeerFailed(why)
        (kind, chunk, micro_batch), samples, size, description = facts
        if (sent := Action(ActionKind(kind), chunk, micro_batch)) != action.other_end:
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
        return unpack(description, raw, self._device), samples

    def _request_header(self) -> None:
        if self._expected > 0 and self._next is None:
            self._expected -= 1
            self._next = self._receive(torch.empty(HEADER, dtype=torch.uint8), "header")

    def _note(self, header: torch.Tensor, label: str) -> list[Any]:
        data = header.numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH], "little")
        if (more := _LENGTH + length - HEADER) > 0:
            rest = torch.empty(more, dtype=torch.uint8)
            self._receive(rest, label).wait()
            data += rest.numpy().tobytes()
        note: list[Any] = json.loads(data[_LENGTH : _LENGTH + length])
        return note

    def _receive(self, values: torch.Tensor, label: str) -> Message:
        tag = message_tags(self._channel, self._count)
        self._count += 1
        return self._comm.receive(values, self._source, label, tag)
