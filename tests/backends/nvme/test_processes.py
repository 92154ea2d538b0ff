"""Several processes on one store: what each sees, who owns what, and what a dead one leaves.

Every peer is a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from l3store.backends.nvme import journal
from l3store.backends.nvme.journal import Entry
from l3store.errors import BackendUnavailable
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import SEGMENT, SLOTS, heals, opened, put, readable, some

OTHER = "kit-0/indexer/all"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def peers(path, peer):
    """Opens the store in so many processes."""

    def start(count, **options):
        return [peer().open(path, **options) for _ in range(count)]

    return start


def _consistent(*all_peers):
    for one in all_peers:
        assert one.problems() == []


# -- seeing each other ----------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["direct", "page"])
def test_what_one_stored_all_read_at_their_next_call(peers, io):
    three = peers(3, io=io)
    for round_ in range(3):
        for number, writer in enumerate(three):
            pages = some(5, seed=10 * round_ + number)
            assert all(writer.put(pages))
            for reader in three:
                assert reader.has(pages) == [True] * 5
                assert reader.readable(pages) == [True] * 5
    _consistent(*three)


def test_what_one_deleted_is_gone_for_all(path, peers):
    """Also when somebody else had stored it, and for who opens the store afterwards."""
    owner, other, third = peers(3)
    assert all(owner.put(some()))
    assert other.delete(some()) == [True] * SLOTS
    for one in (owner, third, other):
        assert one.has(some()) == [False] * SLOTS
        assert one.delete(some()) == [False] * SLOTS
    with opened(path, mode="ro") as fresh:
        assert fresh.batch_exists(some().keys) == 0
        assert fresh.usage() == []
    _consistent(owner, other, third)
    assert all(owner.put(some(seed=1)))
    assert all(other.readable(some(seed=1)))


def test_what_one_evicted_is_gone_for_all(peers):
    owner, other = peers(2, capacity=4 * SEGMENT)
    for seed in range(12):
        assert all(owner.put(some(seed=seed)))
    there = [owner.has(some(seed=seed)) for seed in range(12)]
    assert there == [other.has(some(seed=seed)) for seed in range(12)]
    assert there == [other.readable(some(seed=seed)) for seed in range(12)]
    assert sum(map(sum, there)) <= 4 * SLOTS
    _consistent(owner, other)


def test_pages_of_another_length_are_refused_as_soon_as_one_is_stored(peers):
    owner, other = peers(2)
    assert all(owner.put(some()))
    with pytest.raises(kit.PeerError, match=r"ValueError: pages of .* have 4096 payload bytes"):
        other.put(some(seed=1, size=8192))
    with pytest.raises(kit.PeerError, match=r"ValueError: pages of .* have 4096 payload bytes"):
        other.readable(some(seed=0, size=8192))
    assert all(owner.readable(some()))
    assert all(other.put(some(seed=1, size=8192, place=OTHER)))
    assert all(owner.readable(some(seed=1, size=8192, place=OTHER)))
    _consistent(owner, other)


def test_two_that_store_one_key_at_once(peers):
    """Both are told that it is stored. A delete removes every copy."""
    two = peers(2, writers=2)
    for seed in range(6):
        pages = some(seed=seed)
        for one in two:
            one.begin(f"put(store, some({SLOTS}, seed={seed}))")
        assert all(all(one.result()) for one in two)
        for one in two:
            assert all(one.readable(pages))
        _consistent(*two)
    for seed in range(3):
        assert two[seed % 2].delete(some(seed=seed)) == [True] * SLOTS
        for one in two:
            assert one.has(some(seed=seed)) == [False] * SLOTS
    _consistent(*two)


def _doubled(path, peers):
    """Two owners, each with a copy of the same pages; made by a peer that hears nothing."""
    first, second = peers(2, writers=2, capacity=8 * SEGMENT)
    second.put(some(1, seed=99))
    second.do("held = store._catalog.refresh; store._catalog.refresh = lambda: None")
    assert all(first.put(some()))
    assert all(second.put(some()))
    second.do("store._catalog.refresh = held")
    assert len(kit.segment_files(path)) == 3
    return first, second


def test_a_second_copy_is_deleted_with_the_first(path, peers):
    first, second = _doubled(path, peers)
    for one in (first, second):
        assert all(one.readable(some()))
        assert one.do("store.usage()[0].pages") == SLOTS + 1
    _consistent(first, second)
    assert first.delete(some()) == [True] * SLOTS
    for one in (first, second):
        assert one.has(some()) == [False] * SLOTS
    with opened(path, mode="ro") as fresh:
        assert fresh.batch_exists(some().keys) == 0
    _consistent(first, second)


def test_a_second_copy_stays_when_the_first_is_evicted(path, peers):
    first, second = _doubled(path, peers)
    for seed in range(1, 8):
        assert all(first.put(some(seed=seed)))
    for one in (first, second):
        assert all(one.readable(some()))
    for seed in range(11, 20):
        assert all(second.put(some(seed=seed)))
    for one in (first, second):
        assert not any(one.has(some()))
    _consistent(first, second)


def test_damage_that_a_peer_finds_is_removed_and_heals(path, peers):
    owner, other = peers(2)
    assert all(owner.put(some()))
    other.do("spoil(store, key)", key=some().keys[3])
    assert [i for i, good in enumerate(other.readable(some())) if not good] == [3]
    assert [i for i, good in enumerate(owner.has(some())) if not good] == [3]
    with opened(path, mode="ro") as fresh:
        assert fresh.batch_exists(some().keys) == 3
    assert all(other.put(some()))
    assert all(owner.readable(some()))
    _consistent(owner, other)


def test_what_a_peer_reads_stays_while_the_owner_makes_room(peers):
    owner, other = peers(2, capacity=4 * SEGMENT, evict="lru", writers=1)
    assert all(owner.put(some()))
    for seed in range(1, 4):
        assert all(owner.put(some(seed=seed)))
    assert all(other.readable(some()))
    other.do("look_after(store)")
    assert all(owner.put(some(seed=4)))
    assert all(owner.put(some(seed=5)))
    assert all(owner.has(some()))
    assert not any(owner.has(some(seed=1)))


# -- journals -------------------------------------------------------------------------------------


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
        assert all(put(store, some(seed=1)))
        assert all(other.put(some(seed=2)))
        assert all(third.put(some(seed=3)))
        for seed in range(4):
            assert all(readable(store, some(seed=seed))), seed
            for one in (other, third):
                assert all(one.readable(some(seed=seed))), seed
        assert store.delete(some().keys) == [True] * SLOTS
        assert not any(third.has(some()))
        assert store.check_integrity() == []
        _consistent(other, third)


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


# -- capacity and shares --------------------------------------------------------------------------


def _held(path, one):
    """How many segments a peer owns."""
    return one.do("len(store._estate.owned())")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_sum_of_all_segments_stays_within_the_capacity(path, peers, count):
    """Also when all claim at once."""
    everybody = peers(count, writers=count)
    for round_ in range(4):
        for number, one in enumerate(everybody):
            seeds = [100 * round_ + 10 * number + i for i in range(5)]
            one.begin(f"[all(put(store, some({SLOTS}, seed=seed))) for seed in {seeds}]")
        for one in everybody:
            assert all(one.result())
        assert kit.stored_bytes(path) <= 16 * SEGMENT
    assert kit.stored_bytes(path) == 16 * SEGMENT
    _consistent(*everybody)


def test_each_writer_is_sure_of_its_share(path, peers):
    """16 segments, four writers: whoever comes first may have no more than all but 12."""
    four = peers(4, writers=4)
    for number, one in enumerate(four):
        for seed in range(6 + 10 * number, 26 + 10 * number):
            assert all(one.put(some(seed=seed)))
        assert _held(path, one) == 4
    for one in four:
        assert _held(path, one) == 4
    _consistent(*four)


def test_what_nobody_is_sure_of_is_first_come(path, peers):
    """16 segments, three writers: five each, and one more for the first."""
    three = peers(3, writers=3)
    for number, one in enumerate(three):
        for seed in range(20 * number, 20 * number + 20):
            assert all(one.put(some(seed=seed)))
    assert [_held(path, one) for one in three] == [6, 5, 5]


def test_a_writer_that_comes_late_to_a_store_of_one_is_told_what_to_do(peers):
    first, late = peers(2, capacity=4 * SEGMENT)
    for seed in range(8):
        assert all(first.put(some(seed=seed)))
    with pytest.raises(kit.PeerError, match=r"CapacityError.*writers="):
        late.put(some(seed=9))
    assert all(late.readable(some(seed=7)))
    _consistent(first, late)


@pytest.mark.parametrize("size", [4096, 512])
def test_places_that_compete_come_to_hold_equally_many_pages(path, size):
    """Pages of 32 KiB and small ones of the same chains: neither starves the other."""
    with opened(path, segment=256 << 10, capacity=4 << 20) as store:
        for seed in range(40):
            assert all(put(store, some(8, seed=seed, size=32 << 10)))
            assert all(put(store, some(8, seed=seed, size=size, place=OTHER)))
        held = {usage.place: usage.pages for usage in store.usage()}
        assert all(readable(store, some(8, seed=39, size=32 << 10)))
        assert all(readable(store, some(8, seed=39, size=size, place=OTHER)))
        assert held[OTHER] >= held[kit.PLACE] >= 64
        assert kit.stored_bytes(path) <= 4 << 20
        assert store.check_integrity() == []


# -- what the dead leave --------------------------------------------------------------------------


def test_what_a_killed_process_stored_stays_readable(path, peers):
    killed, other = peers(2, writers=2)
    assert all(killed.put(some()))
    killed.kill()
    assert all(other.readable(some()))
    assert all(other.put(some(seed=1)))
    (fresh,) = peers(1)
    assert all(fresh.readable(some()))
    assert all(fresh.readable(some(seed=1)))
    _consistent(other, fresh)


def test_the_segments_of_the_dead_are_used_again(path, peers):
    """A survivor that needs room takes them over; the files stay as many as they were."""
    killed, other = peers(2)
    for seed in range(8):
        assert all(killed.put(some(seed=seed)))
    killed.kill()
    for seed in range(10, 30):
        assert all(other.put(some(seed=seed)))
    assert _held(path, other) == 16
    assert len(kit.segment_files(path)) == 16
    assert not any(other.has(some()))
    _consistent(other)


def test_a_hundred_restarts_leave_no_more_than_one_writer(path, peers):
    """Killed, closed, killed, ...: each takes over what the one before had, and from about the
    45th on makes room in it."""
    code = (
        "import os, signal, sys\n"
        "from tests.backends.nvme import _kit as kit\n"
        "for n in range(100):\n"
        "    if not (child := os.fork()):\n"
        "        store = kit.opened(sys.argv[1])\n"
        "        assert all(kit.put(store, kit.some(5, seed=n))), n\n"
        "        if 0 < n < 40: assert all(kit.readable(store, kit.some(5, seed=n - 1))), n\n"
        "        if n % 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        store.close()\n"
        "        os._exit(0)\n"
        "    _, status = os.waitpid(child, 0)\n"
        "    assert status in (0, signal.SIGKILL), (n, status)\n"
        "print('good')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.stdout == "good\n", done.stderr
    assert len(list((path / "writers").glob("*.journal"))) == 1
    assert (path / "writers" / "roster").stat().st_size == 33
    assert kit.stored_bytes(path) <= 16 * SEGMENT
    with opened(path) as store:
        assert all(readable(store, some(5, seed=99)))
        assert heals(store, some(seed=1000))
        assert store.check_integrity() == []


def test_as_many_writers_as_ran_at_once_are_left(path, peers):
    for _ in range(5):
        three = peers(3, writers=3)
        for number, one in enumerate(three):
            assert all(one.put(some(3, seed=number)))
            assert all(one.put(some(3, seed=number, place=OTHER)))
        for one in three:
            one.kill()
    assert len(list((path / "writers").glob("*.journal"))) <= 3


# -- processes that stand still, and forks --------------------------------------------------------


def test_a_stopped_process_that_holds_the_roster_is_told_of_and_waited_for_no_longer(path, peers):
    """Who needs no new segment goes on; who does is told after two seconds, and can later."""
    stopped, other = peers(2, writers=2)
    assert all(other.put(some(5)))
    assert all(stopped.put(some(5, seed=1)))
    stopped.do("lock = store._members.locked(); lock.__enter__()")
    os.kill(stopped.pid, signal.SIGSTOP)
    assert all(other.put(some(2, seed=2)))
    assert all(other.readable(some(5, seed=1)))
    with pytest.raises(kit.PeerError, match=r"BackendUnavailable.*roster.*is it stopped\?"):
        other.put(some(2 * SLOTS, seed=3))
    assert all(other.readable(some(5)))
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.do("lock.__exit__(None, None, None)")
    assert all(other.put(some(2 * SLOTS, seed=3)))
    _consistent(stopped, other)


def test_a_stopped_process_keeps_nobody_from_reading(path, peers):
    stopped, other = peers(2)
    assert all(stopped.put(some()))
    os.kill(stopped.pid, signal.SIGSTOP)
    assert all(other.readable(some()))
    with opened(path) as fresh:
        assert all(readable(fresh, some()))
    os.kill(stopped.pid, signal.SIGCONT)
    assert all(stopped.readable(some()))


def test_a_store_that_was_open_at_a_fork_is_the_parents_alone(path):
    """The child is told to open its own; nothing it does touches the parent's."""
    with opened(path) as store:
        assert all(put(store, some()))
        with store._catalog.lock:  # as another thread might, at the moment of the fork
            child = os.fork()
            if not child:
                os._exit(_refused_in_the_child(store))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(readable(store, some()))
        assert heals(store, some(3 * SLOTS, seed=1))
        assert store.check_integrity() == []


def _refused_in_the_child(store):
    signal.alarm(20)
    calls = [
        lambda: put(store, some(2, seed=7)), lambda: readable(store, some(1)),
        lambda: store.batch_exists(some().keys), lambda: store.delete(some().keys), store.usage,
        store.health,
    ]  # fmt: skip
    for number, call in enumerate(calls, 1):
        try:
            call()
        except BackendUnavailable as error:
            if "fork" in str(error):
                continue
        return number
    store.close()
    return 0
