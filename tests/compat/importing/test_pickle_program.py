"""Pickles read as data: values come back, and nothing of a hostile file runs."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.compat.importing.pickle_program import PersistentId, PickledCall, PickledName, read_program
from zero_trial.errors import CheckpointError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    return read_program(io.BytesIO(data), "test.pt")


@settings(max_examples=100, deadline=None)
@given(PLAIN, st.integers(3, 5))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int) -> None:
    value = {"a": [1, 2.5, "ä", None, True, -(10**30)], "b": ((), (1,), (1, 2, 3, 4)), 3: {"x": []}}
    assert read(pickle.dumps(value, protocol)) == value


def test_what_is_used_twice_is_one_object() -> None:
    shared: list[int] = [1]
    first, second = read(pickle.dumps([shared, shared], 2))
    assert first is second


def test_the_stream_is_left_behind_the_pickle() -> None:
    stream = io.BytesIO(pickle.dumps(1, 2) + pickle.dumps("two", 2))
    assert [read_program(stream, "test.pt") for _ in range(2)] == [1, "two"]


def test_names_and_calls_are_records() -> None:
    found = read(pickle.dumps(OrderedDict(a=1), 2))
    assert isinstance(found, PickledCall) and found.target == PickledName("collections", "OrderedDict")
    assert found.path == "collections.OrderedDict" and found.pairs == [("a", 1)]


class Point:
    """Pickled by protocol 2 as a new object with a state."""

    def __init__(self) -> None:
        self.x = 1


def test_objects_are_calls_with_a_state() -> None:
    found = read(pickle.dumps(Point(), 2))
    assert isinstance(found, PickledCall) and found.state == {"x": 1}


def test_what_lies_outside() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", 7) if obj == "outside" else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump(["outside"])
    assert read(stream.getvalue()) == [PersistentId(("storage", 7))]


# Each writes the file MARK if it is run. The last two take memory instead.
BOMBS = {
    "reduce": b"\x80\x02cos\nsystem\nX%s.",
    "subprocess": b"\x80\x02csubprocess\nPopen\nX%s.",
    "eval": b"\x80\x02cbuiltins\neval\nX%s.",
    "python 2": b"\x80\x02c__builtin__\neval\nX%s.",
    "posix": b"\x80\x02cposix\nsystem\nX%s.",
    "import": b"\x80\x02cbuiltins\n__import__\nX%s.",
    "runpy": b"\x80\x02crunpy\n_run_code\nX%s.",
    "nested pickle": b"\x80\x02c_pickle\nloads\nX%s.",
    "torch.load": b"\x80\x02ctorch\nload\nX%s.",
}


def bomb(kind: str, mark: Path) -> bytes:
    """A pickle that calls with one text, ``touch MARK`` or Python's words for it."""
    words = f"open({str(mark)!r}, 'w').close()" if "eval" in kind or kind == "python 2" else f"touch {mark}"
    text = words.encode()
    head, _, tail = BOMBS[kind].partition(b"X%s")
    return head + b"X" + struct.pack("<I", len(text)) + text + b"\x85R" + tail


@pytest.mark.parametrize("kind", sorted(BOMBS))
def test_bombs_are_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    data = bomb(kind, tmp_path / "mark")
    with pytest.raises(
        CheckpointError,
        match=r"would run a program if it were loaded with pickle: got it names .*Nothing of it was run",
    ):
        read(data)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["reduce", "eval"])
def test_the_bombs_are_real(kind: str, tmp_path: Path) -> None:
    """Python's own reader does run them: otherwise the test above could not fail."""
    pickle.loads(bomb(kind, tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


def test_a_name_from_the_stack_is_seen_too() -> None:
    data = b"\x80\x04\x8c\x02os\x8c\x06system\x93."
    with pytest.raises(CheckpointError, match=r"os\.system"):
        read(data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"(ios\nsystem\n.", "INST"),
        (b"(cos.path\njoin\no.", "os.path"),
        (b"(cmy\nClass\no.", "OBJ"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02]}b.", "a state for a list"),
        (b"\x80\x02}(K\x01e.", "a dict where a list belongs"),
        (b"\x80\x02]K\x01K\x02s.", "a list where a dict belongs"),
        (b"\x80\x02K\x01", "ValueError"),
        (b"\x80\x02.", "IndexError"),
        (b"\x80\x02h\x07.", "KeyError"),
        (b"\x80\x02}]K\x01s.", "unhashable"),
        (b"\x80\x02K\x01K\x02\x93.", "no text"),
        (b"\x80\x02cmy\nf\nK\x01R.", "no tuple"),
        (b"\x80\x02B\xff\xff\xff\x7fabc.", "ValueError"),
        (b"", "ValueError"),
        (b"PK\x03\x04", "ValueError"),
    ],
)
def test_what_no_checkpoint_has(data: bytes, word: str) -> None:
    with pytest.raises(CheckpointError, match=r"test\.pt: .*" + word):
        read(data)


def test_a_huge_number_of_a_memo_takes_no_memory() -> None:
    """Python's own reader would make room for all numbers below it, 32 GiB here."""
    assert read(b"\x80\x02]r\xff\xff\xff\x7f.") == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_one_clean_error(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        read(data)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_flipped_byte(place: int, value: int) -> None:
    data = bytearray(pickle.dumps({"a": OrderedDict(x=[1, 2, (3, "b")]), "c": {1.5, 2.5}}, 2))
    data[place % len(data)] = value
    with contextlib.suppress(CheckpointError):
        read(bytes(data))


def test_every_opcode_that_pickle_writes_by_protocol_2_is_known() -> None:
    """Those that are refused: objects by other ways than calls, the extension registry, ids as
    text, buffers outside the stream."""
    refused = set()
    for opcode in pickletools.opcodes:
        try:
            read(opcode.code.encode("latin-1") + b".")
        except CheckpointError as fault:
            if "opcode" in str(fault):
                refused.add(opcode.name)
        except Exception:
            pytest.fail(opcode.name)
    assert refused <= {
        "INST",
        "OBJ",
        "EXT1",
        "EXT2",
        "EXT4",
        "PERSID",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
        "BYTEARRAY8",
        "POP_MARK",
    }


# a tuple of twice itself, 45 times: its hash, by Python's, would take a day
NESTED = b")" + b"2\x86" * 45
DEEP = b")" + b"\x85" * 200_000  # Python's hash of it would use up all of C's stack


@pytest.mark.parametrize("tuples", [NESTED, DEEP])
@pytest.mark.parametrize(
    "around",
    [(b"}", b"K\x01s."), (b"}(", b"K\x01u."), (b"(", b"K\x01d."), (b"\x8f(", b"\x90."), (b"(", b"\x91.")],
    ids=["setitem", "setitems", "dict", "additems", "frozenset"],
)
def test_keys_that_would_never_be_hashed(around: tuple[bytes, bytes], tuples: bytes) -> None:
    with pytest.raises(CheckpointError, match="a key of more than 64 values"):
        read(b"\x80\x04" + around[0] + tuples + around[1])


def test_tuples_are_keys_where_they_are_small() -> None:
    value = {("a", (1, 2)): 3, frozenset([("b", 4)]): 5}
    assert read(pickle.dumps(value, 4)) == value


def test_arguments_that_many_calls_share_are_not_copied() -> None:
    first, second = read(b"\x80\x02](K\x01K\x02\x86q\x00cm\nf\nh\x00Rcm\nf\nh\x00Re.")[1:]
    assert first.args is second.args
