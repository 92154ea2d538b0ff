"""Addresses, registered memory, and what goes by way of copies."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from l3store.backends.mooncake.memory import Copies, Registered, Scratch, addresses, spread
from l3store.errors import ConfigError


class Library:
    """The two calls of the library that this part uses, kept as the library keeps them: ranges
    that overlap are refused."""

    def __init__(self):
        self.ranges = {}

    def register_buffer(self, start, size):
        if any(start < s + n and s < start + size for s, n in self.ranges.items()):
            return -600
        self.ranges[start] = size
        return 0

    def unregister_buffer(self, start):
        del self.ranges[start]
        return 0


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def registered(library):
    return Registered(library)


def at(start, size):
    return ctypes.string_at(start, size)


def test_addresses_are_those_of_the_bytes_whatever_holds_them():
    data = bytearray(os.urandom(4096))
    view, mapped = memoryview(data), mmap.mmap(-1, 4096)
    mapped[:4] = b"here"
    pieces = [view[100:228], view[1000:], view[7:8].toreadonly(), memoryview(mapped)]
    for chosen in (pieces[:2], pieces):
        found = addresses(chosen)
        assert [at(s, p.nbytes) == bytes(p) for s, p in zip(found, chosen, strict=True)] == (
            [True] * len(chosen)
        )


def test_pages_are_spread_piece_by_piece():
    view = memoryview(bytearray(range(200)))
    pages = [(view[:10], view[10:50]), (view[50:60], view[60:80], view[80:100])]
    pointers, sizes, strangers = spread(pages)
    assert sizes == [[10, 40], [10, 20, 20]]
    assert [at(s, n) for s, n in zip(pointers[1], sizes[1], strict=True)] == [
        bytes(view[50:60]), bytes(view[60:80]), bytes(view[80:100])
    ]  # fmt: skip
    assert strangers == []
    asked = spread(pages, lambda start, size: size != 20)[2]
    assert asked == [(1, 1), (1, 2)]


def test_only_whole_pieces_within_one_buffer_are_covered(registered):
    one, two = memoryview(bytearray(1000)), memoryview(bytearray(1000))
    start = registered.add(one)
    registered.add(two)
    assert registered.covers(start, 1000)
    assert registered.covers(start + 1, 999)
    assert not registered.covers(start + 1, 1000)
    assert not registered.covers(start - 1, 10)
    assert not Registered(Library()).covers(start, 1)


def test_a_buffer_that_two_stores_announce_is_forgotten_with_the_second(registered, library):
    buffer = memoryview(bytearray(1000))
    start = registered.add(buffer)
    assert registered.add(buffer) == start
    registered.remove(start)
    assert registered.covers(start, 1000)
    registered.remove(start)
    assert not registered.covers(start, 1)
    assert library.ranges == {}


def test_who_looks_while_another_thread_registers_and_forgets_sees_whole_lists(registered):
    buffers = [memoryview(bytearray(100)) for _ in range(3)]
    seen = [registered._starts]
    starts = []
    for buffer in buffers:
        starts.append(registered.add(buffer))
        seen.append(registered._starts)
    for start in starts:
        registered.remove(start)
        seen.append(registered._starts)
    assert [len(one) for one in seen] == [0, 1, 2, 3, 2, 1, 0]


def test_memory_that_overlaps_is_refused(registered):
    buffer = memoryview(bytearray(1000))
    registered.add(buffer[:500])
    with pytest.raises(ConfigError, match="overlap"):
        registered.add(buffer[400:])


@pytest.mark.parametrize("buffer", [memoryview(bytearray(10))[::2], memoryview(b"")])
def test_memory_that_is_none_or_lies_in_pieces_is_refused(registered, buffer):
    with pytest.raises(ValueError, match="contiguous and not empty"):
        registered.add(buffer)


def test_copies_are_registered_reused_and_few(registered, library):
    copies = Copies(registered)
    pieces = [memoryview(bytearray(300_000)), memoryview(bytearray(128))]
    for _ in range(3):
        with copies.of(pieces) as ours:
            assert [piece.nbytes for piece in ours] == [300_000, 128]
            for piece in ours:
                (start,) = addresses([piece])
                assert registered.covers(start, piece.nbytes)
    assert len(library.ranges) == 1
    held = [copies.of(pieces) for _ in range(9)]
    for one in held:
        one.__enter__()
    assert len(library.ranges) == 9
    for one in held:
        one.__exit__(None, None, None)
    assert len(library.ranges) == 4, "free copies beyond a few are given back"


def test_scratch_is_handed_out_to_one_at_a_time(registered, library):
    scratch = Scratch(registered)
    with scratch.piece() as (one, start):
        assert registered.covers(start, one.nbytes)
        with scratch.piece() as (_, other):
            assert other != start
    with scratch.piece() as (_, again):
        assert again in (start, other)
    assert len(library.ranges) == 2
