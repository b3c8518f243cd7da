"""Descriptor tables are laid out as the kernels read them."""

from __future__ import annotations

import struct

import pytest
import torch

from zero_trial.ops.arguments import TILE, LaunchItem, table_of, tiles_of, upload


def test_pieces_in_tiles_and_each_group_once() -> None:
    p, q, r = torch.zeros(TILE + 1), torch.zeros(3), torch.zeros(TILE)
    g = torch.zeros(3, dtype=torch.bfloat16)
    table = table_of(
        [LaunchItem(p, scalars=b"aaaa"), LaunchItem(q, g, scalars=b"bbbb"), LaunchItem(r, scalars=b"aaaa")]
    )
    assert (table.count, table.tiles, table.groups) == (3, 4, 3 * 64)
    assert table.content[table.groups :] == b"aaaabbbb"
    rows = [struct.unpack("5P3q", table.content[64 * i : 64 * (i + 1)]) for i in range(3)]
    assert rows[0] == (p.data_ptr(), 0, 0, 0, 0, TILE + 1, 0, 0)
    assert rows[1] == (q.data_ptr(), g.data_ptr(), 0, 0, 0, 3, 2, 1)
    assert rows[2] == (r.data_ptr(), 0, 0, 0, 0, TILE, 3, 0)


@pytest.mark.parametrize(("n", "tiles"), [(0, 0), (1, 1), (TILE, 1), (TILE + 1, 2)])
def test_tiles(n: int, tiles: int) -> None:
    assert tiles_of(n) == tiles


def test_the_bytes_arrive() -> None:
    assert bytes(upload(b"\x00\x07\xff", torch.device("cpu")).tolist()) == b"\x00\x07\xff"
