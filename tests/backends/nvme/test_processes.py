"""Several processes on one store: what each sees, who owns what, and what a dead one leaves.

Every peer is a process of its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

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


def test_two_that_disagree_on_the_length_of_a_place_at_once(path, peers):
    """One of them is right for all, the other is told."""
    two = peers(2, writers=2, capacity=64 * SEGMENT)  # room for all, whoever is right
    for place in (f"kit-0/kv/T{n}of8" for n in range(8)):
        lengths = (4096, 8192)
        for one, size in zip(two, lengths, strict=True):
            one.begin(f"put(store, some(5, size={size}, place={place!r}))")
        told = [_told(one) for one in two]
        assert sorted(told) == ["ValueError", "stored"]
        kept = lengths[told.index("stored")]
        with opened(path, mode="ro") as fresh:
            assert all(readable(fresh, some(5, size=kept, place=place)))
        assert all(all(one.readable(some(5, size=kept, place=place))) for one in two)
        more = some(9, seed=1, size=kept, place=place)
        assert all(two[told.index("ValueError")].put(more))
        assert all(all(one.readable(more)) for one in two)
    _consistent(*two)


def _told(one):
    """What came of storing: the kind of error if it was one."""
    try:
        return "stored" if all(one.result()) else "partly"
    except kit.PeerError as error:
        return error.kind


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
    limit = time.monotonic() + 30
    for seed in itertools.count(10):
        assert all(other.put(some(seed=seed)))
        # Who finds none to take over looks again a while later, not at each call.
        if seed >= 30 and (_held(path, other) == 16 or time.monotonic() > limit):
            break
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


def test_a_forked_child_keeps_nobody_from_what_its_dead_parent_had(path, peers):
    """Locks are the parent's alone."""
    parent, other = peers(2)
    assert all(parent.put(some()))
    parent.do("child = os.fork()\nif not child: time.sleep(600)")
    child = parent.do("child")
    try:
        parent.kill()
        for seed in range(1, 20):
            assert all(other.put(some(seed=seed)))
        assert _held(path, other) == 16
    finally:
        os.kill(child, signal.SIGKILL)


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


def test_a_stopped_process_that_holds_a_record_is_told_of_and_the_rest_goes_on(path, peers):
    stopped, other = peers(2)
    assert all(stopped.put(some()))
    stopped.do("segment = store._catalog.segments[0]; lock = segment._locked(3, 1)")
    stopped.do("lock.__enter__()")
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(kit.PeerError, match=r"BackendUnavailable.*seg-000000.*is it stopped\?"):
        other.do("store.delete([key])", key=some().keys[3])
    assert other.do("store.delete([key])", key=some().keys[4]) == [True]
    assert all(other.put(some(seed=1)))
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.do("lock.__exit__(None, None, None)")
    other.do("store.delete([key])", key=some().keys[3])  # or its owner has heard of it already
    assert stopped.has(some()) == [i not in (3, 4) for i in range(SLOTS)]
    _consistent(stopped, other)


def test_a_process_that_has_no_descriptors_left_is_told_and_loses_nothing(path, peers):
    one, other = peers(2)
    assert all(other.put(some()))
    assert all(one.put(some(3, seed=1)))
    one.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
    one.do("taken = []")
    one.do("try:\n    while True: taken.append(os.open('/', os.O_RDONLY))\nexcept OSError: pass\n")
    with pytest.raises(kit.PeerError, match="BackendUnavailable"):
        one.put(some(3 * SLOTS, seed=2))
    one.do("store._estate.look_after()")
    one.do("[os.close(file) for file in taken]")
    assert all(one.put(some(3 * SLOTS, seed=2)))
    for reader in (one, other):
        assert all(reader.readable(some()))
        assert all(reader.readable(some(3, seed=1)))
        assert all(reader.readable(some(3 * SLOTS, seed=2)))
    _consistent(one, other)


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
