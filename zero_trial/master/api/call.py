"""One request on its way to a route: what was asked, by whom, and the cluster that can answer."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from zero_trial.master.api.request import BadRequest, Request
from zero_trial.master.auth import Principal, require_own
from zero_trial.master.records import EARLIEST, LATEST
from zero_trial.master.verbs import Cluster, Forbidden, Invalid

T = TypeVar("T")

MAX_NUMBER = 2**31 - 1  # of an id, an offset or a limit on the wire
DEEPEST = 100  # levels of a body; code that walks it does so by recursion


class Waits:
    """Counts the requests that wait for something to happen, so that they cannot take every connection."""

    def __init__(self, limit: int) -> None:
        self._free = threading.BoundedSemaphore(limit)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Yields whether there is room to wait; holds the place for the block."""
        granted = self._free.acquire(blocking=False)
        try:
            yield granted
        finally:
            if granted:
                self._free.release()


@dataclass(frozen=True)
class Call:
    """A request whose sender is known and whose body has been read."""

    cluster: Cluster
    request: Request
    numbers: Mapping[str, int]
    principal: Principal
    waits: Waits

    @property
    def user(self) -> str:
        """Whose name an experiment gets. Forbidden for an allocation."""
        if self.principal.user is None:
            raise Forbidden("this needs a user's token")
        return self.principal.user.name

    def own(self, **asked: object) -> None:
        """Forbidden if an allocation asks for what is not its own; a user may ask for everything."""
        if self.principal.allocation is not None:
            require_own(self.principal.allocation, **asked)

    def require_admin(self) -> None:
        if self.principal.user is None or not self.principal.user.admin:
            raise Forbidden("only an administrator may do this")

    def text(self, name: str) -> str:
        """A named part of the path."""
        return self.request.args[name]

    def number(self, name: str) -> int:
        """A named part of the path that is a number."""
        return self.numbers[name]

    def body(self) -> dict[str, Any]:
        """The JSON object that came with the request; empty if nothing came. Raises BadRequest."""
        if not self.request.body:
            return {}
        try:
            value = json.loads(self.request.body.decode("utf-8"))  # from bytes, json takes half characters too
        except (ValueError, RecursionError):
            raise BadRequest(400, "the body is not JSON") from None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadRequest(400, "the body is not a JSON object")
        if _may_be_odd(self.request.body):
            check_text(value)
        return value

    def query_number(self, name: str, default: int) -> int:
        """A whole number of the query string. Invalid if it is none."""
        text = self.request.first(name)
        if not text:
            return default
        return whole(text, name)

    def query_flag(self, name: str, default: bool = False) -> bool:
        text = self.request.first(name).lower()
        return default if not text else text in ("true", "1", "yes")

    def query_time(self, name: str) -> float | None:
        """A moment of the query string (RFC 3339) in seconds since the epoch. Invalid if it is none."""
        text = self.request.first(name)
        return moment(text, name) if text else None

    def query_all(self, name: str) -> list[str]:
        """Every value of a field that may come more than once."""
        return list(self.request.query.get(name, ()))

    def page(self, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """The part of a list that ``offset`` and ``limit`` ask for, with Determined's account of it. Limit 0 or -1: all; -2: only the account."""
        total = len(items)
        start = min(max(self.query_number("offset", 0), 0), total)
        limit = self.query_number("limit", 0)
        end = start if limit == -2 else total if limit <= 0 else min(start + limit, total)
        account = {"offset": start, "limit": limit, "startIndex": start, "endIndex": end, "total": total}
        return items[start:end], account


def _may_be_odd(body: bytes | bytearray) -> bool:
    """Whether ``check_text`` could find something, without looking at each value: most bodies are reports of a few numbers."""
    return b"\\u" in body or body.count(b"[") + body.count(b"{") > DEEPEST


def check_text(value: Any) -> None:
    """Raises BadRequest, with the place, for text that has no UTF-8 (half of a surrogate pair) and for values nested too deeply."""
    todo: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while todo:
        item, path = todo.pop()
        if len(path) > DEEPEST:
            raise BadRequest(400, f"the body is nested more than {DEEPEST} levels deep")
        if isinstance(item, str):
            if not _is_whole(item):
                raise BadRequest(400, f"half a character (a lone surrogate) in the text at {_place(path)}")
        elif isinstance(item, dict):
            for key, inner in item.items():
                if not _is_whole(key):
                    raise BadRequest(400, f"half a character (a lone surrogate) in a key at {_place(path)}")
                todo.append((inner, (*path, key)))
        elif isinstance(item, list):
            todo += ((inner, (*path, at)) for at, inner in enumerate(item))


def _is_whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _place(path: tuple[str | int, ...]) -> str:
    """``$.lines[3].log``."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def whole(value: Any, name: str) -> int:
    """A whole number of a size that an id or a count can have. Invalid otherwise."""
    try:
        if isinstance(value, bool) or (
            isinstance(value, str) and not (value.isascii() and value.removeprefix("-").isdigit())
        ):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{name} must be a whole number", got=repr(value)[:60]) from None
    if abs(number) > MAX_NUMBER:
        raise Invalid(f"{name} is too large", got=number)
    return number


def real(value: Any, name: str) -> float:
    """A finite number. Invalid otherwise."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Invalid(f"{name} must be a number", got=repr(value)[:60])
    return number


def moment(text: str, name: str) -> float:
    """Seconds since the epoch of an RFC 3339 time. Invalid otherwise."""
    try:
        seconds = datetime.fromisoformat(text.strip().replace("Z", "+00:00").replace("z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(f"{name} must be a time such as 2026-01-31T12:00:00Z", got=repr(text)[:60]) from None
    if not EARLIEST <= seconds <= LATEST:
        raise Invalid(f"{name} must be a time in the years 1 to 9999 of UTC", got=repr(text)[:60])
    return seconds
