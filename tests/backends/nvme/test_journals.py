"""Journals that run over, or are damaged by hand: peers see all the same, and nothing wrong."""

from __future__ import annotations

import os

import pytest

from l3store.backends.nvme import journal
from l3store.backends.nvme.journal import Entry
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import SEGMENT, SLOTS, opened, put, readable, some


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def peers(path, peer):
    """Opens the store in so many processes."""
    return lambda count: [peer().open(path) for _ in range(count)]


@pytest.mark.parametrize("entries", [1, 60_000, 65_535, 65_536, 70_000, 200_000])
def test_a_peer_that_was_lapped_looks_at_the_tables(path, peers, entries):
    """A journal holds 65,536 entries."""
    (other,) = peers(1)
    with opened(path) as store:
        assert all(put(store, some()))
        assert all(other.has(some()))
        told = store._estate.writer(kit.PLACE).journal
        for start in range(0, entries, 50_000):
            told.append([Entry(journal.TOUCH, 0)] * min(50_000, entries - start))
        assert store.delete(some().keys[:3]) == [True] * 3
        assert all(put(store, some(seed=1)))
        assert other.has(some()) == [False] * 3 + [True] * (SLOTS - 3)
        assert all(other.readable(some(seed=1)))
        assert all(put(store, some(seed=2)))
        assert all(other.readable(some(seed=2)))
        assert other.problems() == []


def _journal(path):
    (file,) = (path / "writers").glob("*.journal")
    return file


def _emptied(path):
    os.truncate(_journal(path), 0)


def _zeroed(path):
    kit.overwrite(_journal(path), 0, bytes(_journal(path).stat().st_size))


def _noise(path):
    kit.overwrite(_journal(path), 4096, b"\xa5\x17" * 4096)


def _head_far_away(path):
    kit.overwrite(_journal(path), 64, (1 << 60).to_bytes(8, "little"))


SPOILERS = {
    "emptied": _emptied,
    "zeroed": _zeroed,
    "noise": _noise,
    "head far away": _head_far_away,
    "deleted": lambda path: _journal(path).unlink(),
    "roster emptied": lambda path: os.truncate(path / "writers" / "roster", 0),
    "roster deleted": lambda path: (path / "writers" / "roster").unlink(),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=[*SPOILERS])
def test_a_journal_or_roster_that_is_damaged_while_peers_run(path, peers, spoil):
    """Within a second it is whole again, for those who are there and for those who come."""
    (other,) = peers(1)
    with opened(path) as store:
        assert all(put(store, some()))
        assert all(other.has(some()))
        spoil(path)
        assert all(other.readable(some()))
        kit.look_after(store)
        other.do("look_after(store)")
        (third,) = peers(1)
        assert all(third.readable(some()))
        assert all(third.put(some(seed=3)))
        assert all(readable(store, some(seed=3)))
        assert all(other.readable(some(seed=3)))
        assert all(put(store, some(seed=1)))
        assert all(other.put(some(seed=2)))
        for seed in range(4):
            assert all(readable(store, some(seed=seed))), seed
            for one in (other, third):
                assert all(one.readable(some(seed=seed))), seed
        assert store.delete(some().keys) == [True] * SLOTS
        assert not any(third.has(some()))
        assert store.check_integrity() == []
        assert other.problems() == third.problems() == []


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=[*SPOILERS])
def test_a_journal_or_roster_that_is_damaged_while_nobody_runs(path, spoil):
    """What is stored stays, and its room is used again."""
    with opened(path, capacity=4 * SEGMENT) as store:
        assert all(put(store, some(3 * SLOTS)))
    spoil(path)
    with opened(path) as store:
        assert all(readable(store, some(3 * SLOTS)))
        for seed in range(1, 9):
            assert all(put(store, some(seed=seed)))
        assert len(kit.segment_files(path)) == 4
        assert all(readable(store, some(seed=8)))
        assert not all(store.exists_each(some(3 * SLOTS).keys))
        assert store.check_integrity() == []


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)],
    ids=["FIFO", "folder", "link"],
)  # fmt: skip
def test_what_only_has_a_journals_name_is_passed_over(path, make):
    with opened(path) as store:
        assert all(put(store, some()))
        make(f"{path}/writers/{'0' * 32}.journal")
        assert all(put(store, some(seed=1)))
    with opened(path) as store:
        assert all(readable(store, some()))
        assert all(put(store, some(seed=2)))
        assert store.check_integrity() == []
