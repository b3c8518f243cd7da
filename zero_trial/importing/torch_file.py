"""A file of ``torch.save``, opened without pickle: its structure as values, and its tensors as views of a memory map.

Both of torch's formats are read. The newer one is an uncompressed zip archive; the older one is a row of pickles with the storages' bytes
behind them.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_trial.errors import CheckpointError
from zero_trial.importing.program import read_program
from zero_trial.importing.values import Resolver, Storage, Stored

LARGEST_PROGRAM = 1 << 30
OLD_MAGIC = 0x1950A86A20F9469CFC6C


class Place(NamedTuple):
    """Where a storage's bytes lie in the file, and the CRC-32 that they should have (None: the format has none)."""

    start: int
    size: int
    crc: int | None


class TorchFile:
    """``path``, opened; ``content`` is what ``torch.load`` would have returned, with :class:`Stored` for tensors.

    Opening reads the structure only. A storage's bytes are compared with their CRC-32 when the first tensor of it is asked for. Raises
    CheckpointError for everything that is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, Place] = {}
        self._checked: set[str] = set()
        try:
            with path.open("rb") as file:
                # copy on write: torch wants memory that may be written to; nothing writes to it
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as fault:
            raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
        self._resolver = Resolver(str(path), self._read)
        self.content = self._from_zip() if self._map[:4] == b"PK\3\4" else self._from_old()

    def _from_zip(self) -> Any:
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error) as fault:
            raise self._damaged(str(fault)) from fault
        places = {entry.filename.partition("/")[2]: self._place(entry) for entry in entries}
        program = places.pop("data.pkl", None)
        if program is None:
            raise CheckpointError(
                "this is not a file of torch.save", where=str(self.path), got="a zip archive without data.pkl"
            )
        if program.size > LARGEST_PROGRAM:
            raise self._damaged(f"a structure of {program.size} bytes")
        self._check_order(places.get("byteorder"))
        self._places = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
        return self._resolver.resolve(read_program(io.BytesIO(self._bytes(program, "data.pkl")), str(self.path)))

    def _place(self, entry: zipfile.ZipInfo) -> Place:
        """Where an entry's bytes begin stands in front of them, not in the archive's list."""
        header = self._map[entry.header_offset : entry.header_offset + 30]
        if (
            entry.compress_type != zipfile.ZIP_STORED
            or entry.flag_bits & 1
            or header[:4] != b"PK\3\4"
            or len(header) < 30
        ):
            raise self._damaged(f"entry {entry.filename} is compressed, encrypted or torn")
        name, extra = struct.unpack("<HH", header[26:30])
        place = Place(entry.header_offset + 30 + name + extra, entry.file_size, entry.CRC)
        if place.start + place.size > len(self._map):
            raise self._damaged(f"entry {entry.filename} ends behind the end of the file")
        return place

    def _check_order(self, place: Place | None) -> None:
        order = self._map[place.start : place.start + place.size] if place is not None else b"little"
        if order != b"little":
            raise CheckpointError(
                "the numbers are in another byte order", where=str(self.path), got=order, expected="little"
            )

    def _from_old(self) -> Any:
        stream = self._map
        stream.seek(0)
        if stream[:1] != b"\x80":
            raise CheckpointError(
                "this is not a file of torch.save", where=str(self.path), got=f"it begins with {stream[:4]!r}"
            )
        magic, version, _, program, keys = (read_program(stream, str(self.path)) for _ in range(5))  # type: ignore[arg-type]
        if magic != OLD_MAGIC or version != 1001 or not isinstance(keys, list):
            raise CheckpointError("this is not a file of torch.save", where=str(self.path), got="another pickle")
        content = self._resolver.resolve(program)
        for key in keys:
            storage = self._resolver.storages.get(str(key)) if isinstance(key, (str, int)) else None
            if storage is None:
                raise self._damaged("a storage belongs to nothing")
            place = Place(stream.tell() + 8, storage.numel * storage.dtype.itemsize, None)
            if int.from_bytes(stream.read(8), "little") != storage.numel or place.start + place.size > len(stream):
                raise self._damaged(f"storage {storage.key} is cut short")
            self._places[storage.key] = place
            stream.seek(place.start + place.size)
        return content

    def _read(self, stored: Stored) -> torch.Tensor:
        if stored.numel == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        place = self._place_of(stored.storage)
        count = place.size // stored.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=place.start)
        return flat.as_strided(stored.shape, stored.strides, stored.offset)

    def _place_of(self, storage: Storage) -> Place:
        place = self._places.get(storage.key)
        size = storage.numel * storage.dtype.itemsize
        if place is None or place.size != size:
            got = "nothing" if place is None else f"{place.size} bytes"
            raise self._damaged(f"{got} for storage {storage.key} of {size} bytes")
        if storage.key not in self._checked:
            self._bytes(place, f"storage {storage.key}", copy=False)
            self._checked.add(storage.key)
        return place

    def _bytes(self, place: Place, what: str, copy: bool = True) -> bytes:
        with memoryview(self._map)[place.start : place.start + place.size] as view:
            if place.crc is not None and zlib.crc32(view) != place.crc:
                raise self._damaged(f"{what} has another CRC-32 than when it was written")
            return bytes(view) if copy else b""

    def _damaged(self, got: str) -> CheckpointError:
        return CheckpointError(
            "this file is damaged", where=str(self.path), got=got, fix="Copy it again from where it was written."
        )
