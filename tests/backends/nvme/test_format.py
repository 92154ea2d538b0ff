"""The bytes on the drive, as docs/backends/nvme.md gives them: a store must be readable for ever.

Made and read here by offsets alone, without the code that writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from l3store.backends.nvme.format import (
    DEAD,
    Geometry,
    Superblock,
    live_pages,
    pack_record,
    record_holds,
)
from l3store.backends.nvme.journal import DEL, JOURNAL_BYTES, PUT, Entry, Journal
from l3store.errors import IntegrityError
from l3store.page import place_digest
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import PLACE, SEGMENT, SLOTS, opened, put, readable, some

WRITER, BOOT, IDENTITY = b"w" * 16, b"b" * 16, b"i" * 16
BLOCK = Superblock(7, PLACE, Geometry(1 << 20, 5000), WRITER, BOOT, IDENTITY, durable=True)


# -- the superblock -------------------------------------------------------------------------------


def _superblock():
    """By hand, field by field."""
    body = (
        b"L3SEGMNT"
        + (1).to_bytes(4, "little")
        + (1).to_bytes(4, "little")  # flag: durable
        + (1 << 20).to_bytes(8, "little")
        + (7).to_bytes(4, "little")
        + (123).to_bytes(4, "little")  # slots
        + (5000).to_bytes(8, "little")
        + WRITER + BOOT + IDENTITY
        + PLACE.encode().ljust(256, b"\0")
    )  # fmt: skip
    assert len(body) == 344
    return (body + xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(4096, b"\0")


def test_the_superblock():
    assert BLOCK.pack() == _superblock()
    assert Superblock.parse(_superblock(), 7, 1 << 20) == BLOCK
    digest = "033530233f56f16503a0a9d6a90f67ca"
    assert hashlib.sha256(_superblock()).hexdigest()[:32] == digest


def test_a_superblock_that_is_not_durable():
    packed = replace(BLOCK, durable=False).pack()
    assert packed[12:16] == bytes(4)
    assert not Superblock.parse(packed, 7, 1 << 20).durable


def _summed(data):
    """With a sum that holds: as another version, or somebody's mistake, would write it."""
    return data[:344] + xxh3_64_intdigest(data[:344]).to_bytes(8, "little") + data[352:]


def _with(at, value):
    data = _superblock()
    return _summed(data[:at] + value + data[at + len(value) :])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (_superblock()[:4095], "truncated"),
        (bytes(4096), "magic"),
        (b"L4" + _superblock()[2:], "magic"),
        (_superblock()[:300] + b"x" + _superblock()[301:], "magic"),
        (_with(8, (2).to_bytes(4, "little")), "version"),
        (_with(16, (2 << 20).to_bytes(8, "little")), "length"),
        (_with(24, (8).to_bytes(4, "little")), "length"),
        (_with(28, (124).to_bytes(4, "little")), "length"),
        (_with(28, bytes(4)), "length"),
        (_with(32, bytes(8)), "length"),
        (_with(32, b"\xff" * 8), "length"),
        (_with(88, b"../../etc/passwd" + bytes(240)), "place"),
        (_with(88, b"\xff" * 256), "place"),
        (_with(88, bytes(256)), "place"),
    ],
)  # fmt: skip
def test_a_superblock_that_says_something_else_is_refused_by_its_reason(data, reason):
    with pytest.raises(IntegrityError) as caught:
        Superblock.parse(data, 7, 1 << 20)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("segment", "payload", "slots", "data"),
    [
        (64 << 10, 4096, 14, 8192),
        (64 << 10, 1, 14, 8192),
        (1 << 20, 5000, 123, 36864),
        (16 << 20, 65536, 254, 69632),
        (16 << 20, 131072, 127, 36864),
        (1 << 30, 1 << 20, 1023, 266240),
        (12288, 4096, 1, 8192),
        (12288, 4097, 0, 4096),
    ],
)
def test_where_slots_lie(segment, payload, slots, data):
    geometry = Geometry(segment, payload)
    assert (geometry.slots, geometry.data_offset) == (slots, data)
    assert data + slots * geometry.slot_bytes <= segment


# -- records --------------------------------------------------------------------------------------

HEADER = bytes(range(128))


def _record(generation=0x0102030405060708, payload=4096, state=b"LIVE"):
    body = (
        HEADER
        + generation.to_bytes(8, "little")
        + state
        + bytes(4)
        + payload.to_bytes(8, "little")
    )  # fmt: skip
    assert len(body) == 152
    return (body + xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(256, b"\0")


def test_a_record():
    assert pack_record(HEADER, 0x0102030405060708, 4096) == _record()
    assert record_holds(_record())
    digest = "9c7af4027658fbbb"
    assert hashlib.sha256(_record()).hexdigest()[:16] == digest


def test_a_free_slot_is_zeros():
    assert bytes(256) == DEAD
    assert not record_holds(DEAD)


def test_every_byte_of_a_record_counts():
    for at in range(160):
        spoilt = bytearray(_record())
        spoilt[at] ^= 1
        assert not record_holds(bytes(spoilt)), at


def test_only_whole_records_of_the_place_and_length_are_live():
    digest = place_digest(PLACE)
    of_place = HEADER[:16] + digest + HEADER[32:]
    good = pack_record(of_place, 5, 4096)
    torn = good[:130] + b"\xff\xff" + good[132:]
    table = b"".join([
        DEAD, good, torn, pack_record(HEADER, 5, 4096), pack_record(of_place, 5, 4097),
        b"\xff" * 256, pack_record(of_place, 6, 4096),
    ])  # fmt: skip
    assert live_pages(table, digest, 4096) == [(1, HEADER[32:64], 5), (6, HEADER[32:64], 6)]


# -- journals -------------------------------------------------------------------------------------


def test_a_journal(tmp_path):
    file = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT)
    journal = Journal(file)
    journal.make()
    journal.append([Entry(PUT, 3, 7, 2, 0x1122334455667788), Entry(DEL, 4, 9)])
    journal.put_counters([1, 2, 3, 4])
    data = (tmp_path / "journal").read_bytes()
    os.close(file)
    assert len(data) == 4096 + 65536 * 32 == JOURNAL_BYTES
    assert data[:16] == b"L3JOURNL" + (1).to_bytes(4, "little") + (65536).to_bytes(4, "little")
    assert struct.unpack("<Q", data[64:72]) == (2,)
    assert struct.unpack("<4Q", data[128:160]) == (1, 2, 3, 4)
    put, delete = data[4096:4128], data[4128:4160]
    assert put[:28] == (
        (0).to_bytes(8, "little") + b"\x01" + (2).to_bytes(3, "little") + (3).to_bytes(4, "little")
        + (7).to_bytes(4, "little") + (0x1122334455667788).to_bytes(8, "little")
    )  # fmt: skip
    assert delete[:20] == (
        (1).to_bytes(8, "little") + b"\x02" + (1).to_bytes(3, "little") + (4).to_bytes(4, "little")
        + (9).to_bytes(4, "little")
    )  # fmt: skip
    for entry in (put, delete):
        assert entry[28:] == xxh3_64_intdigest(entry[:28]).to_bytes(8, "little")[:4]
    assert not any(data[4160:])


def test_entries_of_an_earlier_lap_are_not_taken_for_new_ones(tmp_path):
    """A head that was written although its entries were not: None, look at the tables."""
    file = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT)
    journal = Journal(file)
    journal.make()
    journal.append([Entry(PUT, 3), Entry(DEL, 4)])
    kit.overwrite(tmp_path / "journal", 64, struct.pack("<Q", 65536 + 2))
    journal.seen = 65536
    assert journal.news() is None
    assert journal.seen == 65536 + 2
    os.close(file)


# -- a whole store --------------------------------------------------------------------------------


def test_a_store_by_its_bytes_alone(tmp_path):
    """What lies where after one call, found by the tables of the documentation."""
    pages = some(3, size=5000)
    with opened(tmp_path / "store") as store:
        assert all(put(store, pages))
    marker = json.loads((tmp_path / "store" / "store.json").read_bytes())
    assert marker == {
        "format": 1, "kind": "nvme", "settings": {"segment_bytes": SEGMENT, "segments": 16},
    }  # fmt: skip
    (journal,) = (tmp_path / "store" / "writers").glob("*.journal")
    roster = (tmp_path / "store" / "writers" / "roster").read_text()
    assert roster == f"{journal.stem}\n"
    (file,) = kit.segment_files(tmp_path / "store")
    data = file.read_bytes()
    assert len(data) == SEGMENT
    assert data[40:56].hex() == journal.stem
    assert data[88:344] == PLACE.encode().ljust(256, b"\0")
    slots, payload = struct.unpack("<I", data[28:32])[0], struct.unpack("<Q", data[32:40])[0]
    assert (slots, payload) == (7, 5000)
    assert list(_pages(data, slots)) == [pages.stored(i) for i in range(3)]


def _pages(data, slots):
    begin = 4096 + -(-slots * 256 // 4096) * 4096
    for slot in range(slots):
        record = data[4096 + 256 * slot :][:256]
        if record[136:140] == b"LIVE":
            length = int.from_bytes(record[144:152], "little")
            yield record[:128] + data[begin + slot * 8192 :][:length]


def test_a_store_that_was_made_by_hand_is_read(tmp_path):
    """By the tables of the documentation, without a line of the code that writes."""
    path, pages = tmp_path / "store", some()
    for folder in (path, path / "writers"):
        folder.mkdir()
    settings = {"segment_bytes": SEGMENT, "segments": 16}
    marker = {"format": 1, "kind": "nvme", "settings": settings}
    (path / "store.json").write_text(json.dumps(marker))
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = bytes.fromhex(file.read().strip().replace("-", ""))
    body = (
        b"L3SEGMNT" + struct.pack("<IIQIIQ", 1, 0, SEGMENT, 5, SLOTS, 4096) + WRITER + boot
        + IDENTITY + PLACE.encode().ljust(256, b"\0")
    )  # fmt: skip
    head = body + xxh3_64_intdigest(body).to_bytes(8, "little")
    table = b""
    for i in range(SLOTS):
        record = pages.stored(i)[:128] + struct.pack("<Q4sIQ", i, b"LIVE", 0, 4096)
        table += (record + xxh3_64_intdigest(record).to_bytes(8, "little")).ljust(256, b"\0")
    slots = b"".join(pages.payloads)
    segment = path / "seg-000005"
    segment.write_bytes(head.ljust(4096, b"\0") + table.ljust(4096, b"\0") + slots)
    with opened(path) as store:
        assert all(readable(store, pages))
        assert store.check_integrity() == []
        assert all(put(store, some(seed=1)))
        assert all(readable(store, pages))


# -- other formats --------------------------------------------------------------------------------


def test_a_segment_of_another_format_is_nobodys_page(tmp_path):
    """It is not read, it is no page, and its number is free."""
    path = tmp_path / "store"
    with opened(path, capacity=4 * SEGMENT) as store:
        assert all(put(store, some(4 * SLOTS)))
    file = kit.segment_files(path)[2]
    data = file.read_bytes()
    file.write_bytes(_summed(data[:8] + (2).to_bytes(4, "little") + data[12:]))
    with opened(path) as store:
        assert sum(readable(store, some(4 * SLOTS))) == 3 * SLOTS
        assert all(put(store, some(seed=1)))
        assert all(readable(store, some(seed=1)))
        assert store.check_integrity() == []


def test_a_segment_of_another_size_is_nobodys_page(tmp_path):
    with opened(tmp_path / "other", segment=2 * SEGMENT) as store:
        assert all(put(store, some(seed=1)))
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
    (file,) = kit.segment_files(tmp_path / "other")
    file.rename(tmp_path / "store" / "seg-000003")
    with opened(tmp_path / "store") as store:
        assert store.batch_exists(some(seed=1).keys) == 0
        assert all(readable(store, some()))
        for seed in range(20):
            assert all(put(store, some(seed=seed)))
        assert {one.stat().st_size for one in kit.segment_files(tmp_path / "store")} == {SEGMENT}
