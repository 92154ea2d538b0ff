"""Stores on small disks, peers on one store, and segments that are damaged behind their back.

Run as a program this file is the nursery of `Peer`s: it has everything imported and no store open,
and forks a peer for each connection, so that a process costs milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress

from l3store import registry
from l3store.backends.nvme.format import RECORD_BYTES, SUPERBLOCK_BYTES
from l3store.keys import split_keys
from l3store.page import opener
from l3store.testing.kit import Pages
from l3store.testing.plugin import NotHere

PLACE = "kit-0/kv/all"
SEGMENT = 64 << 10
"""Holds 14 pages of 4096 bytes."""
SLOTS = 14


# -- stores and pages -----------------------------------------------------------------------------


def url(path, **options):
    """The store at `path`: a new one of 16 segments of 14 pages, if the options do not say
    otherwise; one that is there as it is."""
    if not os.path.lexists(f"{path}/store.json"):
        options = {"capacity": 16 * SEGMENT, "segment": SEGMENT, **options}
    elif "capacity" in options:
        options = {"segment": SEGMENT, **options}
    return f"nvme://{path}?" + "&".join(f"{name}={value}" for name, value in options.items())


def opened(path, **options):
    """The bare store."""
    return registry.open(url(path, **options), raw=True)


def some(count=SLOTS, *, seed=0, size=4096, place=PLACE, segments=1):
    """Pages of one prefix; another seed gives others."""
    return Pages(count, size, segments, place, seed)


def put(store, pages):
    """Stores pages and returns for each whether it is stored."""
    return store.page_set(pages.keys, pages.sealed())


def readable(store, pages, offset=0):
    """For each page whether it can be read; whatever is called read is what was stored."""
    room = pages.room(offset=offset)
    done = store.page_get(pages.keys, room.pages, opener(pages.keys))
    wrong = pages.wrong(done, room)
    assert not wrong, f"not what was stored: {wrong}"
    assert room.intact()
    return done


def heals(store, pages):
    """Stores again what is gone, and says whether all can be read then."""
    return all(put(store, pages)) and all(readable(store, pages))


def segment_files(path):
    """The segment files of a store, in order."""
    return sorted(file for file in path.iterdir() if file.name.startswith("seg-"))


def stored_bytes(path):
    """The bytes of all segment files."""
    return sum(file.lstat().st_size for file in segment_files(path))


def tree(path):
    """All that stands in a folder: name -> (kind and mode, bytes, time of change)."""
    return {
        str(file.relative_to(path)): (found.st_mode, found.st_size, found.st_mtime_ns)
        for file in path.rglob("*")
        for found in (file.lstat(),)
    }


def look_after(store):
    """What the keeper of a store does each second, now."""
    store._chores._told_at = float("-inf")
    store._chores.do()


def ten_seconds_pass(store):
    """What the store would not try again just yet it tries now."""
    estate = store._estate
    estate._grow_at = 0.0
    estate._failed = dict.fromkeys(estate._failed, 0.0)


# -- where a page lies ----------------------------------------------------------------------------


def where(store, key):
    """(segment file, slot, geometry) of a page, as this store knows it."""
    catalog, root = store._catalog, store._folder.name
    with catalog.lock:
        catalog.refresh()
        (location,) = catalog.found(split_keys((key,)), unproved=True)
        at = catalog.at(location)
    return f"{root}/seg-{at.segment.number:06d}", at.slot, at.segment.geometry


def pages_of(store, path, pages):
    """The numbers of those pages that lie in one segment file."""
    return [i for i, key in enumerate(pages.keys) if where(store, key)[0] == str(path)]


def record_at(slot):
    """Where a slot's record begins in its segment."""
    return SUPERBLOCK_BYTES + slot * RECORD_BYTES


def overwrite(path, offset, data):
    """Writes behind a store's back."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def spoil(store, key, *, of_payload=7):
    """Turns one byte of a stored payload."""
    path, slot, geometry = where(store, key)
    at = geometry.data_offset + slot * geometry.slot_bytes + of_payload
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def clear_record(store, key):
    """Frees a slot behind the store's back."""
    path, slot, _ = where(store, key)
    overwrite(path, record_at(slot), bytes(RECORD_BYTES))


# -- disks ----------------------------------------------------------------------------------------


def run(*words):
    """Runs a program of the system; `NotHere` where it is missing or refused."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotHere(f"{words[0]} is not installed") from error
    if done.returncode:
        raise NotHere(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def mounted(folder, *options):
    """Mounts something at a folder that is made for it."""
    if os.geteuid():
        raise NotHere("only root may mount")
    folder.mkdir()
    run("mount", *options, str(folder))
    try:
        yield folder
    finally:
        if subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def in_memory(folder, kind="tmpfs", size="4M"):
    """A file system in memory: tmpfs of a size, or ramfs, which has neither O_DIRECT nor
    fallocate."""
    options = ["-o", f"size={size}"] if kind == "tmpfs" else []
    return mounted(folder, "-t", kind, *options, kind)


@contextmanager
def on_loop(folder, *, mib=16, make=("mkfs.ext4", "-q"), sector=512, options=()):
    """A file system on a loop device over a file beside `folder`; gives (folder, device)."""
    if os.geteuid():
        raise NotHere("only root may mount")
    image = folder.with_name(f"{folder.name}.img")
    with open(image, "wb") as file:
        file.truncate(mib << 20)
    device = run("losetup", "-f", "--show", "-b", str(sector), str(image))
    try:
        run(*make, device)
        with mounted(folder, *options, device):
            yield folder, device
    finally:
        subprocess.run(["losetup", "-d", device], check=False)


def fill_up(folder, left=0, name="filling"):
    """Fills a file system but for `left` bytes; gives the file that does it."""
    path = folder / name
    found = os.statvfs(folder)
    size = found.f_bavail * found.f_frsize - left
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while size > 0:
            size -= file.write(bytes(min(size, 1 << 16)))
    return path


# -- descriptors that fail ------------------------------------------------------------------------


@contextmanager
def broken_drive(store, *paths):
    """Every read and write of these files through the store's own descriptors is a real EIO.

    They become descriptors of the memory of a process that has none at such low addresses, which
    is the one file of every Linux whose reads and writes fail like those of a dead drive.
    """
    other = subprocess.Popen(["sleep", "600"])
    try:
        memory = os.open(f"/proc/{other.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        with ExitStack() as opened_files:
            opened_files.callback(os.close, memory)
            for path in paths:
                for handle in _handles(store, str(path)):
                    kept = os.dup(handle.file)
                    os.dup2(memory, handle.file, inheritable=False)
                    opened_files.callback(os.close, kept)
                    opened_files.callback(os.dup2, kept, handle.file, inheritable=False)
            yield
    finally:
        other.kill()
        other.wait()


def _handles(store, path):
    """Handles of a segment's slots and records, open from now on."""
    number = int(path[-6:])
    segment = store._catalog.segments[number]
    files = [store._files.get(segment, data=data) for data in (False, True)]
    return list({id(one): one for one in files}.values())


# -- peers ----------------------------------------------------------------------------------------


class PeerError(Exception):
    """A peer's call raised; `kind` is the name of the error's class."""

    def __init__(self, kind, message, trace):
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Peer:
    """A process of its own that does what it is told.

    It knows what this module has, and ``store`` once it was told to `open`.
    """

    def __init__(self, address):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self.pid = json.loads(self._lines.readline())

    def open(self, path, **options):
        self.do(f"global store; store = opened({str(path)!r}, **{options!r})")
        return self

    def do(self, code, **values):
        """Runs `code` with these values; returns its value if it is an expression."""
        self.begin(code, **values)
        return self.result()

    def begin(self, code, **values):
        """The same without waiting."""
        self._lines.write(json.dumps([code, values]) + "\n")
        self._lines.flush()

    def result(self):
        line = self._lines.readline()
        if not line:
            raise EOFError(f"peer {self.pid} is gone")
        good, value = json.loads(line)
        if not good:
            raise PeerError(*value)
        return value

    def put(self, pages):
        return self.do(f"put(store, some{_args(pages)})")

    def readable(self, pages):
        return self.do(f"readable(store, some{_args(pages)})")

    def has(self, pages):
        return self.do(f"store.exists_each(some{_args(pages)}.keys)")

    def delete(self, pages):
        return self.do(f"store.delete(some{_args(pages)}.keys)")

    def problems(self):
        return self.do("store.check_integrity()")

    def kill(self):
        """kill -9, and waits until it is gone with all its locks."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(OSError):
            self._lines.close()
        self._socket.close()
        # Its descriptors, and the locks on them, are closed before it leaves the list of processes.
        with suppress(ProcessLookupError):
            while True:
                os.kill(self.pid, 0)
                time.sleep(0.001)


def _args(pages):
    return (
        f"({pages.count}, seed={pages.seed}, size={pages.size}, place={pages.place!r}, "
        f"segments={pages.segments})"
    )


@contextmanager
def nursery(address):
    """Starts the nursery; gives a function that starts a peer."""
    program = subprocess.Popen(
        [sys.executable, __file__, str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        program.stdout.readline()
        yield lambda: Peer(str(address))
    finally:
        program.stdin.close()
        program.stdout.close()
        program.wait()


def _nurse(address):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for peers
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    print("ready", flush=True)
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if not os.fork():
            server.close()
            try:
                _obey(connection)
            finally:
                os._exit(0)
        connection.close()


def _obey(connection):
    lines = connection.makefile("rw", encoding="utf-8")

    def say(value):
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    say(os.getpid())
    names = globals()
    while line := lines.readline():
        code, values = json.loads(line)
        names.update(values)
        try:
            try:
                value = eval(compile(code, "peer", "eval"), names)
            except SyntaxError:
                value = None
                exec(compile(code, "peer", "exec"), names)
        except Exception as error:
            say([False, [type(error).__name__, str(error), traceback.format_exc()]])
        else:
            say([True, value])


if __name__ == "__main__":
    _nurse(sys.argv[1])
