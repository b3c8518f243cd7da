"""A pickle's program, read: what it would build as inert values, with nothing that it names
imported and nothing that it calls called.

A pickle is a program for a small stack machine. This is such a machine whose only values are
numbers, texts, containers and records: where Python's own would import a name it puts down a
:class:`Name`, and where that would call something it puts down a :class:`Call`. The opcodes are
those of protocols 0 to 5 that checkpoints use; another one is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from zero_trial.errors import CheckpointError

LARGEST_KEY = 64
"""Values of a key, tuples inside tuples counted: Python hashes a tuple by walking all of it, each
time, however often its parts repeat."""

MOST_OPERATIONS = 20_000_000
"""About 200 000 tensors; more is no checkpoint that one file would hold."""

FORBIDDEN_MODULES = frozenset((
    "os", "posix", "nt", "subprocess", "pty", "runpy", "importlib", "imp", "ctypes", "socket",
    "shutil", "sys", "code", "codeop", "commands", "marshal", "pickle", "_pickle",
    "multiprocessing", "asyncio", "signal", "webbrowser", "timeit", "pdb", "bdb", "cProfile", "pip",
))  # fmt: skip
FORBIDDEN_NAMES = frozenset(
    f"{home}.{name}"
    for home in ("builtins", "__builtin__")
    for name in ("eval", "exec", "execfile", "compile", "open", "__import__", "breakpoint", "input", "globals", "vars")
) | {"torch.load", "torch.hub.load", "torch.jit.load", "types.CodeType", "types.FunctionType", "numpy.load"}


class PickledName(NamedTuple):
    """Something of a Python module that the program names: ``collections``, ``OrderedDict``."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


class PersistentId(NamedTuple):
    """Something outside the program: torch's storages."""

    key: Any


class PickledCall:
    """A call ``target(*args)`` that was not made; ``state``, ``items`` and ``pairs`` are what the
    program would put into its result."""

    __slots__ = ("args", "items", "pairs", "state", "target")

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self.target = target
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    @property
    def path(self) -> str:
        return self.target.path if isinstance(self.target, PickledName) else "something without a name"


def read_program(stream: IO[bytes], where: str) -> Any:
    """Read what the pickle at ``stream``'s position would build; the stream is behind it then.

    Raises CheckpointError for bytes that are no such program, and for one that names what no
    checkpoint needs and an attack does.
    """
    machine = _Machine(where)
    try:
        for count, (code, argument, position) in enumerate(pickletools.genops(stream)):
            if code.name == "STOP":
                return machine.stack.pop()
            act = _ACTIONS.get(code.name)
            if act is None or count > MOST_OPERATIONS:
                got = (
                    f"opcode {code.name} at byte {position}"
                    if act is None
                    else f"more than {MOST_OPERATIONS} operations"
                )
                raise CheckpointError("this is not a pickle that torch.save writes", where=where, got=got)
            act(machine, argument)
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as fault:
        raise CheckpointError(
            "this is not a pickle that can be read", where=where, got=f"{type(fault).__name__}: {fault}"[:200]
        ) from fault
    raise CheckpointError("the pickle has no end", where=where)


def _refuse_attacks(name: PickledName, where: str) -> None:
    if name.module.split(".")[0] in FORBIDDEN_MODULES or name.path in FORBIDDEN_NAMES:
        raise CheckpointError(
            "this file would run a program if it were loaded with pickle",
            where=where,
            got=f"it names {name.path}",
            expected="tensors, containers and numbers",
            fix="Nothing of it was run. Do not load this file with torch.load; ask where it comes from.",
        )


class _Machine:
    def __init__(self, where: str) -> None:
        self.where = where
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        found = PickledName(module, name)
        _refuse_attacks(found, self.where)
        self.push(found)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def take(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return found

    def call(self, count: int) -> None:
        """Take target, arguments and, for three, keyword arguments, which are kept as one more
        argument."""
        target, args, *rest = self.take(count)
        if not isinstance(args, tuple):
            raise ValueError("arguments that are no tuple")
        self.push(PickledCall(target, (*args, *rest) if rest else args))

    def build(self) -> None:
        (state,) = self.take(1)
        if not isinstance(self.stack[-1], PickledCall):
            raise ValueError(f"a state for a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def extend(self, found: list[Any]) -> None:
        holder = self.stack[-1]
        if isinstance(holder, set):
            holder.update(map(require_key, found))
        else:
            (holder.items if isinstance(holder, PickledCall) else _exactly(holder, list)).extend(found)

    def set_pairs(self, found: list[Any]) -> None:
        pairs = list(zip(found[::2], found[1::2], strict=True))
        holder = self.stack[-1]
        if isinstance(holder, PickledCall):
            holder.pairs.extend(pairs)
        else:
            _exactly(holder, dict).update((require_key(key), item) for key, item in pairs)

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _pairs(found: list[Any]) -> dict[Any, Any]:
    return {require_key(key): item for key, item in zip(found[::2], found[1::2], strict=True)}


def require_key(value: Any) -> Any:
    """Return ``value``, which is to be hashed. Raises ValueError for nested tuples that would take
    unlimited time, or all of C's stack."""
    waiting, room = [value], LARGEST_KEY
    while waiting:
        found = waiting.pop()
        if isinstance(found, tuple):
            room -= len(found) + 1
            if room < 0:
                raise ValueError(f"a key of more than {LARGEST_KEY} values")
            waiting.extend(found)
    return value


Act = Callable[[_Machine, Any], None]

_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip

_ACTIONS: Mapping[str, Act] = {
    **dict.fromkeys(_VALUES, lambda machine, argument: machine.push(argument)),
    "PROTO": lambda machine, argument: None,
    "FRAME": lambda machine, argument: None,
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "MARK": lambda machine, argument: machine.marks.append(len(machine.stack)),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "EMPTY_SET": lambda machine, argument: machine.push(set()),
    "LIST": lambda machine, argument: machine.push(machine.since_mark()),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.since_mark())),
    "FROZENSET": lambda machine, argument: machine.push(frozenset(map(require_key, machine.since_mark()))),
    "DICT": lambda machine, argument: machine.push(_pairs(machine.since_mark())),
    "TUPLE1": lambda machine, argument: machine.push(machine.take(1)),
    "TUPLE2": lambda machine, argument: machine.push(machine.take(2)),
    "TUPLE3": lambda machine, argument: machine.push(machine.take(3)),
    "APPEND": lambda machine, argument: machine.extend(list(machine.take(1))),
    "APPENDS": lambda machine, argument: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, argument: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, argument: machine.set_pairs(list(machine.take(2))),
    "SETITEMS": lambda machine, argument: machine.set_pairs(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.name(*machine.take(2)),
    "REDUCE": lambda machine, argument: machine.call(2),
    "NEWOBJ": lambda machine, argument: machine.call(2),
    "NEWOBJ_EX": lambda machine, argument: machine.call(3),
    "BUILD": lambda machine, argument: machine.build(),
    "BINPERSID": lambda machine, argument: machine.push(PersistentId(machine.take(1)[0])),
    "PUT": lambda machine, argument: machine.remember(argument),
    "BINPUT": lambda machine, argument: machine.remember(argument),
    "LONG_BINPUT": lambda machine, argument: machine.remember(argument),
    "MEMOIZE": lambda machine, argument: machine.remember(len(machine.memo)),
    "GET": lambda machine, argument: machine.push(machine.memo[argument]),
    "BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "POP": lambda machine, argument: machine.stack.pop() and None,
    "DUP": lambda machine, argument: machine.push(machine.stack[-1]),
}
