"""Every system call of a store fails once, one after the other: nothing is lost, nothing leaks.

A story is a list of steps of two stores on one folder. It is told once to count its system calls,
and then once for each of them with that call failing. Whatever a step raises must be a typed
error, and when the fault is over all must be as if the story had just gone another way: what was
acknowledged is there for both, both know the same pages, all slots and segments are of use, and no
descriptor or temporary file is left.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import sys
from contextlib import contextmanager, suppress

import pytest

from l3store.backends.nvme import growth
from l3store.errors import BackendUnavailable, ConfigError, L3Error
from tests.backends.nvme._kit import (
    SEGMENT,
    SLOTS,
    look_after,
    opened,
    put,
    readable,
    some,
    spoil,
    stored_bytes,
    ten_seconds_pass,
)

SEGMENTS = 6
OTHER = "kit-0/indexer/all"

READS = {"pread": errno.EIO, "preadv": errno.EIO, "listdir": errno.EIO}
WRITES = {
    name: errno.ENOSPC
    for name in ("pwrite", "pwritev", "write", "ftruncate", "posix_fallocate", "mkdir", "rename")
}
OTHERS = {"open": errno.EMFILE, "unlink": errno.EIO, "fdatasync": errno.EIO, "fsync": errno.EIO}
LOCKS = {"flock": errno.ENOLCK, "fcntl": errno.ENOLCK}


class Faults:
    """Counts system calls, and lets the `at`-th fail; `lasting`: all from then on."""

    def __init__(self, at=0, code=None, *, lasting=False):
        self.at, self.code, self.lasting = at, code, lasting
        self.calls = []
        self.struck = set()
        self.on = True

    def fails(self, name, usual):
        """Returns the error number with which this call is to fail, or None."""
        if not self.on:
            return None
        self.calls.append((name, *_lines()))
        if len(self.calls) != self.at and not (self.lasting and 0 < self.at < len(self.calls)):
            return None
        self.struck.add(name)
        return self.code or usual

    @contextmanager
    def installed(self):
        owners = [(os, name, code) for name, code in {**READS, **WRITES, **OTHERS}.items()]
        owners += [(fcntl, name, code) for name, code in LOCKS.items()]
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
        kept.append((growth._libc, "fallocate", growth._libc.fallocate))
        for owner, name, code in owners:
            setattr(owner, name, self._wrapped(name, code, getattr(owner, name)))
        growth._libc.fallocate = self._fallocate(growth._libc.fallocate)
        try:
            yield
        finally:
            for owner, name, call in kept:
                setattr(owner, name, call)

    def _wrapped(self, name, usual, call):
        def wrapped(*args, **kwargs):
            gives_back = name in LOCKS and _unlocks(args)
            if not gives_back and (code := self.fails(name, usual)):
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return wrapped

    def _fallocate(self, call):
        def wrapped(*args):
            if code := self.fails("fallocate", errno.ENOSPC):
                growth.ctypes.set_errno(code)
                return -1
            return call(*args)

        return wrapped


def _lines():
    """Where in the backend this call comes from."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        if "/backends/" in (name := frame.f_code.co_filename) and "/tests/" not in name:
            lines.append((name, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines[:3])


def _unlocks(args):
    if args[1] == fcntl.F_OFD_SETLK:
        return args[2][:2] == fcntl.F_UNLCK.to_bytes(2, "little")
    return args[1] == fcntl.LOCK_UN


class World:
    """Two stores on one folder, and what they said."""

    def __init__(self, folder, faults, options):
        self.folder, self.faults, self.options = folder, faults, options
        self.acknowledged = {}  # pages -> numbers of those that are stored for all we know
        self.stores = {}
        self.errors = []
        self.damaged = False

    def open(self, name):
        try:
            self.stores[name] = self._opened()
        except (ConfigError, BackendUnavailable) as error:
            self.errors.append(repr(error))
            with self.quiet():
                self.stores[name] = self._opened()

    def _opened(self):
        store = opened(self.folder, **self.options)
        store._keeper.close()  # what it does is done by the story, so that calls can be counted
        return store

    @contextmanager
    def quiet(self):
        self.faults.on = False
        try:
            yield
        finally:
            self.faults.on = True

    def attempt(self, call, *args):
        try:
            return call(*args)
        except L3Error as error:
            self.errors.append(repr(error))
            return getattr(error, "done", [])

    def put(self, name, pages):
        done = self.attempt(put, self.stores[name], pages)
        known = self.acknowledged.setdefault(_name(pages), (pages, set()))[1]
        known.update(i for i, good in enumerate(done) if good)

    def read(self, name, pages):
        before = len(self.faults.struck)
        done = self.attempt(readable, self.stores[name], pages)
        if len(self.faults.struck) > before or self.damaged:  # what that hits are misses
            good = {i for i, one in enumerate(done) if one}
            self.acknowledged[_name(pages)][1].intersection_update(good)

    def delete(self, name, pages):
        self.acknowledged[_name(pages)][1].clear()
        self.attempt(self.stores[name].delete, pages.keys)

    def close(self, name):
        self.stores.pop(name).close()

    def describe(self, name):
        store = self.stores[name]
        self.attempt(store.health)
        self.attempt(store.put_meta, "kit-0", b"what it is")
        self.attempt(store.get_meta, "kit-0")
        self.attempt(store.headers, some(20, seed=1).keys)
        self.attempt(store.details)

    def look_after(self, name):
        try:
            look_after(self.stores[name])
        except (OSError, L3Error) as error:  # the keeper takes both
            self.errors.append(repr(error))

    # -- when the fault is over ------------------------------------------------------------------

    def over(self, *, evicts):
        """All that must hold."""
        for store in self.stores.values():
            ten_seconds_pass(store)
        for _ in range(1 + SEGMENTS):  # a segment that failed is looked through at each
            for store in self.stores.values():
                store._catalog._read_at = 0.0
                look_after(store)
        for name, store in self.stores.items():
            problems = store.check_integrity()
            assert not problems, (name, problems)
        everything = [pages for pages, _ in self.acknowledged.values()]
        self.agree(everything)
        if not evicts:
            self.keeps_its_word()
        assert stored_bytes(self.folder) <= SEGMENTS * SEGMENT
        self.heals()
        before = self.known(next(iter(self.stores.values())), everything)
        for store in self.stores.values():
            store.close()
        left = list((self.folder / "tmp").glob("*"))
        assert not left or "unlink" in self.faults.struck
        with opened(self.folder) as store:
            assert self.known(store, everything) == before
            self.is_of_use(store, SEGMENTS - evicts)

    def known(self, store, everything):
        return ["".join("01"[one] for one in store.exists_each(p.keys)) for p in everything]

    def agree(self, everything):
        for store in self.stores.values():  # a damage that could not be removed is removed now
            for pages in everything:
                readable(store, pages)
        views = {name: self.known(store, everything) for name, store in self.stores.items()}
        assert len({tuple(view) for view in views.values()}) == 1, views
        for store, view in zip(self.stores.values(), views.values(), strict=True):
            for pages, known in zip(everything, view, strict=True):
                found = "".join("01"[one] for one in readable(store, pages))
                assert found == known, (pages.seed, found, known)

    def keeps_its_word(self):
        for pages, numbers in self.acknowledged.values():
            for name, store in self.stores.items():
                done = readable(store, pages)
                lost = [i for i in numbers if not done[i]]
                assert not lost, (name, pages.seed, lost)

    def heals(self):
        first, *others = self.stores.values()
        pages = some(4, seed=50)
        assert all(put(first, pages))
        for store in (first, *others):
            assert all(readable(store, pages))

    def is_of_use(self, store, segments):
        assert store.check_integrity() == []
        pages = some(segments * SLOTS, seed=99)
        assert all(put(store, pages))
        assert all(readable(store, pages))
        assert store.check_integrity() == []


def _open_below(folder):
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return [file for file in files if file.startswith(f"{folder}/")]


def _name(pages):
    return pages.seed, pages.place


# -- the stories -----------------------------------------------------------------------------------


def two_who_share(world):
    """A dead writer's segments, two new writers, a peer's delete: all fits."""
    world.open("one")
    world.put("one", some(20, seed=1))
    world.open("two")
    world.put("two", some(16, seed=2))
    world.read("two", some(20, seed=1))
    world.read("one", some(16, seed=2))
    world.look_after("one")
    world.describe("one")
    world.delete("two", some(20, seed=1))
    world.put("one", some(5, seed=3))
    world.look_after("two")


def one_that_is_full(world):
    """Eviction, and a place that takes a segment from another, under the eyes of a peer."""
    world.open("one")
    world.open("two")
    world.put("one", some(70, seed=1))
    world.put("one", some(30, seed=2))
    world.put("one", some(3, seed=3, size=9000, place=OTHER))
    world.read("two", some(30, seed=2))
    world.look_after("two")
    world.put("two", some(4, seed=4))


def one_that_syncs(world):
    """Damage, a delete of its own, the end and a new beginning; all synced."""
    world.options |= {"durability": "batch"}
    world.open("one")
    world.put("one", some(20, seed=1))
    with world.quiet():
        keys = some(20, seed=1).keys
        for key in [key for key in keys if any(world.stores["one"].exists_each([key]))][3:5]:
            spoil(world.stores["one"], key)
        world.damaged = True
    world.read("one", some(20, seed=1))
    world.put("one", some(5, seed=2))
    world.delete("one", some(5, seed=2))
    world.look_after("one")
    world.close("one")
    world.open("one")
    world.put("one", some(10, seed=3))
    world.read("one", some(10, seed=3))


STORIES = {two_who_share: False, one_that_is_full: True, one_that_syncs: False}


@pytest.fixture
def told(tmp_path):
    """Tells a story from the same beginning each time."""
    start = tmp_path / "start"
    with opened(start, capacity=SEGMENTS * SEGMENT) as store:
        put(store, some(20, seed=8))
    serial = iter(range(1 << 20))

    def tell(story, faults):
        folder = tmp_path / str(next(serial))
        shutil.copytree(start, folder)
        world = World(folder, faults, {} if STORIES[story] else {"evict": "none"})
        with faults.installed():
            story(world)
            faults.on = False
            world.over(evicts=STORIES[story])
        if _open_below(folder):
            gc.collect()  # what was raised still holds what it was raised over
        assert _open_below(folder) == []
        shutil.rmtree(folder)
        return world

    return tell


def first_of_each(calls):
    """Numbers of the calls, without those that come from the same lines as one before."""
    return list({call: at for at, call in reversed(list(enumerate(calls, 1)))}.values())[::-1]


@pytest.mark.parametrize("story", STORIES)
def test_a_call_that_fails(told, story):
    faults = Faults()
    told(story, faults)
    for at in first_of_each(faults.calls):
        told(story, Faults(at))


@pytest.mark.parametrize("story", STORIES)
def test_all_calls_fail_from_one_on(told, story):
    faults = Faults()
    told(story, faults)
    for at in first_of_each(faults.calls)[::4]:
        told(story, Faults(at, lasting=True))


@pytest.mark.soak
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.ENOMEM])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("story", STORIES)
def test_every_call_fails_with(told, story, lasting, code):
    faults = Faults()
    told(story, faults)
    for at in range(1, len(faults.calls) + 1):
        told(story, Faults(at, code, lasting=lasting))
