"""The power goes: what no sync has covered is lost, torn or kept, in any mixture.

A real run is recorded at the system calls that change files; then what a drive may have of it at
some moment is made in a new folder, and opened as after a boot.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from l3store import registry
from l3store.backends.nvme import catalog, growth, journal
from l3store.backends.nvme.estate import Estate
from l3store.backends.nvme.keeper import Chores
from l3store.testing.kit import bare
from tests.backends.nvme._crash import PLACE, Batch

OTHER = "crash-0/indexer/all"
COUNT, SIZE = 16, 8192
SECTOR = 512
OPTIONS = "io=page&workers=2&deadline=60s"


@dataclass
class Op:
    """One thing that happened: a change to a file or folder, a sync, or a word of the test's."""

    kind: str
    file: int = 0
    """Whose; a folder's path for changes of names."""
    at: int = 0
    data: bytes = b""
    name: str = ""
    words: tuple = ()


@dataclass
class Recording:
    """All of them, in order; made under one lock, so that the order is the real one."""

    root: str
    ops: list[Op] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    files: dict[str, int] = field(default_factory=dict)
    """The number of each file that has a name now; numbers are never used again."""

    def say(self, kind, *words):
        with self.lock:
            self.ops.append(Op(kind, words=words))

    def path(self, file):
        return os.readlink(f"/proc/self/fd/{file}")

    def number(self, path):
        return self.files.setdefault(path, len(self.ops) + 1)

    def covers(self, path):
        return path.startswith(self.root)


@contextmanager
def recorded(root):
    """Records what this process does to the files below `root`."""
    recording = Recording(str(root))
    real = {name: getattr(os, name) for name in ("open", "pwrite", "pwritev", "write", "unlink",
            "ftruncate", "posix_fallocate", "fdatasync", "fsync")}  # fmt: skip
    fallocate, tell, close, sync = growth._libc.fallocate, Estate.tell, Estate._close, Chores.sync

    def ours(file):
        path = recording.path(file)
        return path if recording.covers(path) and not path.endswith(" (deleted)") else None

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        with recording.lock:
            whole = path if dir_fd is None else f"{recording.path(dir_fd)}/{path}"
            new = flags & os.O_CREAT and recording.covers(whole) and not os.path.lexists(whole)
            file = real["open"](path, flags, mode, dir_fd=dir_fd)
            if new:
                recording.ops.append(Op("name", recording.number(whole), name=whole))
            return file

    def write_at(name, file, data, offset):
        with recording.lock:
            moved = real[name](file, data, offset)
            if (path := ours(file)) is not None:
                joined = b"".join(data) if name == "pwritev" else bytes(data)
                recording.ops.append(Op("write", recording.number(path), offset, joined[:moved]))
            return moved

    def write(file, data):
        with recording.lock:
            path = None if file < 3 else ours(file)
            at = os.fstat(file).st_size if path is not None else 0
            moved = real["write"](file, data)
            if path is not None:
                recording.ops.append(Op("write", recording.number(path), at, bytes(data)))
            return moved

    def unlink(path, *, dir_fd=None):
        with recording.lock:
            whole = path if dir_fd is None else f"{recording.path(dir_fd)}/{path}"
            real["unlink"](path, dir_fd=dir_fd)
            if recording.covers(whole) and recording.files.pop(whole, None) is not None:
                recording.ops.append(Op("unlink", name=whole))

    def sized(call, size_of):
        def sized_call(*args):
            with recording.lock:
                result = call(*args)
                if (path := ours(args[0])) is not None:
                    recording.ops.append(Op("size", recording.number(path), size_of(args)))
                return result

        return sized_call

    def synced(name, file):
        with recording.lock:
            real[name](file)
            if (path := ours(file)) is not None:
                whole = os.path.isdir(path)
                recording.ops.append(
                    Op("sync names", name=path) if whole else Op("sync", recording.number(path))
                )

    def tell_(self, kind, runs, generation=0):
        if kind == journal.DEL:
            recording.say("left", *(value for segment, first, count in runs
                                    for value in segment.pages[first : first + count]))  # fmt: skip
        tell(self, kind, runs, generation)

    def close_(self, segment):
        recording.say("left", *segment.pages)
        close(self, segment)

    def sync_(self):
        recording.say("pass")
        sync(self)
        recording.say("passed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "pwrite", lambda *args: write_at("pwrite", *args))
        patch.setattr(os, "pwritev", lambda *args: write_at("pwritev", *args))
        patch.setattr(os, "write", write)
        patch.setattr(os, "unlink", unlink)
        patch.setattr(os, "ftruncate", sized(real["ftruncate"], lambda args: args[1]))
        patch.setattr(
            os, "posix_fallocate", sized(real["posix_fallocate"], lambda args: args[1] + args[2])
        )
        patch.setattr(os, "fdatasync", lambda file: synced("fdatasync", file))
        patch.setattr(os, "fsync", lambda file: synced("fsync", file))
        patch.setattr(
            growth._libc, "fallocate", sized(fallocate, lambda args: args[2].value + args[3].value)
        )
        patch.setattr(Estate, "tell", tell_)
        patch.setattr(Estate, "_close", close_)
        patch.setattr(Chores, "sync", sync_)
        yield recording


# -- what a drive has of it -----------------------------------------------------------------------


def after_the_cut(recording, base, folder, behind, rng):
    """Makes `folder` what is left of the recording's first `behind` operations.

    What a sync covered is there. Of the rest each write is kept, lost or torn by sectors, each
    change of a size kept or lost, and of the changes of one name some of the first are kept.
    """
    shutil.copytree(base, folder)
    ops = recording.ops[:behind]
    synced, named = {}, {}
    for at, op in enumerate(ops):
        if op.kind == "sync":
            synced[op.file] = at
        elif op.kind == "sync names":
            named[op.name] = at
    keep = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    torn = rng.choice((0.0, 0.0, 0.5))
    names = defaultdict(list)
    changes = defaultdict(list)
    numbers = dict(recording.first)
    for at, op in enumerate(ops):
        if op.kind in ("name", "unlink"):
            names[op.name].append((at, op))
        elif op.kind in ("write", "size"):
            changes[op.file].append((at, op))
    for path, events in names.items():
        sure = sum(at < named.get(os.path.dirname(path), -1) for at, _ in events)
        kept = events[: rng.randint(sure, len(events)) if rng.random() > keep else len(events)]
        if kept:
            last = kept[-1][1]
            numbers[path] = last.file if last.kind == "name" else 0
    for path, number in numbers.items():
        target = folder / os.path.relpath(path, recording.root)
        if not number:
            target.unlink(missing_ok=True)
            continue
        fresh = any(op.kind == "name" and op.file == number for _, op in names[path])
        content = bytearray(b"" if fresh else target.read_bytes())
        for at, op in changes[number]:
            sure = at < synced.get(number, -1)
            if op.kind == "size":
                if sure or rng.random() < max(keep, 0.5):
                    del content[op.at :]
                    content.extend(bytes(op.at - len(content)))
                continue
            if not sure and rng.random() >= keep:
                if rng.random() >= torn:
                    continue
                sectors = range(op.at // SECTOR, -(-(op.at + len(op.data)) // SECTOR))
                pieces = [sector for sector in sectors if rng.random() < 0.5]
            else:
                pieces = [None]
            if len(content) < op.at + len(op.data) and (sure or op.at <= len(content)):
                content.extend(bytes(op.at + len(op.data) - len(content)))
            for piece in pieces:
                start = op.at if piece is None else max(op.at, piece * SECTOR)
                end = op.at + len(op.data)
                if piece is not None:
                    end = min(end, (piece + 1) * SECTOR)
                end = min(end, len(content))
                if start < end:
                    content[start:end] = op.data[start - op.at : end - op.at]
        target.write_bytes(content)


# -- the run --------------------------------------------------------------------------------------


class Run:
    """A recorded run of several openings, and what it promised until each moment."""

    def __init__(self, folder, openings):
        store = folder / "store"
        self.url = f"nvme://{{}}?capacity=1MiB&segment=128KiB&{OPTIONS}"
        registry.open(self.url.format(store)).close()
        self.base = folder / "base"
        shutil.copytree(store, self.base)
        self.numbers = []
        with recorded(store) as recording:
            self.recording = recording
            recording.first = {str(path): recording.number(str(path))
                               for path in store.rglob("*") if path.is_file()}  # fmt: skip
            # Different numbers, also before the first operation.
            for at, path in enumerate(recording.first):
                recording.first[path] = recording.files[path] = -1 - at
            for durability, batches in openings:
                self._write(store, durability, batches)

    def _write(self, store, durability, batches):
        first = len(self.numbers)
        options = f"&durability={durability}&sync_interval=0.02"
        with registry.open(self.url.format(store) + options) as opened:
            numbers = range(first, first + batches)
            self.numbers += numbers
            halves = [
                threading.Thread(target=self._set, args=(opened, durability, numbers[half::2]))
                for half in (0, 1)
            ]
            for thread in halves:
                thread.start()
            for thread in halves:
                thread.join()

    def _set(self, store, durability, numbers):
        for number in numbers:
            place = place_of(number)
            batch = Batch(COUNT, SIZE, place)
            keys = batch.keys(number)
            done = store.page_set(keys, batch.sealed(number))
            hashes = batch.chain(number).hashes
            self.recording.say(
                "stored", durability, *(v for v, good in zip(hashes, done, strict=True) if good)
            )
            if number % 3 == 2:
                start = 8 * (number % 2)  # all of them: the next batch finds room without eviction
                self.recording.say("left", *hashes[start:])
                store.delete(keys[start:])
            if durability == "interval":
                time.sleep(0.02)  # so that many intervals end meanwhile

    def promised(self, behind):
        """Pages that must be there after a cut at that moment, by hash."""
        ops = self.recording.ops[:behind]
        passes = [at for at, op in enumerate(ops) if op.kind == "passed"]
        begun = [at for at, op in enumerate(ops) if op.kind == "pass"]
        covered = max((at for at in begun if passes and at < passes[-1]), default=-1)
        found = set()
        for at, op in enumerate(ops):
            if op.kind == "stored" and (
                op.words[0] == "batch" or (op.words[0] == "interval" and at < covered)
            ):
                found.update(op.words[1:])
            elif op.kind == "left":
                found.difference_update(op.words)
        return found

    def cut(self, folder, seed):
        """Cuts the power at a moment, boots, and looks. Returns how many pages had to be there."""
        rng = random.Random(seed)
        quarter, ops = len(self.recording.ops) // 4, self.recording.ops
        moments = range(quarter, len(ops) + 1)
        if seed % 2:  # when most is at stake
            moments = [at for at in moments[:-1] if ops[at].kind == "sync"] or moments
        behind = rng.choice(moments)
        after_the_cut(self.recording, self.base, folder, behind, rng)
        promised = self.promised(behind)
        scrub = rng.choice(("", "&scrub_rate=0"))
        with booted(), registry.open(self.url.format(folder) + scrub) as store:
            there = set()
            for number in self.numbers:
                batch = Batch(COUNT, SIZE, place_of(number))
                keys, hashes = batch.keys(number), batch.chain(number).hashes
                claimed = store.exists_each(keys)
                reader = rng.choice((store, bare(store)))
                done = reader.page_get(keys, batch.room)
                assert not batch.wrong(number, done), (seed, number)
                assert all(done[i] for i, one in enumerate(claimed) if one), (seed, number)
                assert store.exists_each(keys) == done
                there.update(value for value, good in zip(hashes, done, strict=True) if good)
            lost = len(promised - there)
            assert not lost, f"seed {seed}: {lost} of {len(promised)} promised pages are lost"
            for number in range(900, 909):  # and all of the room is there
                batch = Batch(COUNT, SIZE)
                assert all(store.page_set(batch.keys(number), batch.sealed(number)))
                assert all(store.page_get(batch.keys(number), batch.room))
                assert not batch.wrong(number, [True] * COUNT)
            assert bare(store).check_integrity() == []
            slots = sum(len(one.pages) for one in bare(store)._estate.owned())
            assert slots == 8 * 15
        shutil.rmtree(folder)
        return len(promised)


@contextmanager
def booted():
    """The machine has another boot id than when the run was recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "boot_id", lambda: b"the next boot...")
        yield


def place_of(number):
    return OTHER if number % 5 == 4 else PLACE


RUNS = {
    "batch": [("batch", 24)],
    "interval": [("interval", 24)],
    "none": [("none", 24)],
    "none, then batch": [("none", 10), ("batch", 12)],
    "batch, then none": [("batch", 12), ("none", 10)],
    "interval, then batch": [("interval", 10), ("batch", 8), ("interval", 6)],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_power_cut_takes_what_it_may_and_makes_nothing_wrong(tmp_path, run):
    recorded_run = Run(tmp_path, RUNS[run])
    promised = [recorded_run.cut(tmp_path / str(seed), seed) for seed in range(35)]
    assert (sum(promised) > 0) == (run != "none")
