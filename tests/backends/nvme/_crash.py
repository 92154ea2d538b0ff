"""Processes on one store that can be killed at any moment, and what they told until then.

Run as a program this file is the nursery: it has everything imported and no store open, and forks a
`Worker` for each line on its standard input, so that a killed process is replaced in milliseconds.

A worker writes a line to its log before and after each call. The lines outlive it, and are stamped
with the monotonic clock, which all processes share. Before a page leaves the store for room, the
worker that removes it says so: a page that was acknowledged and is missing must have such a line.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from l3store import page, registry
from l3store.backends.nvme import growth, journal
from l3store.backends.nvme.estate import Estate
from l3store.backends.nvme.segment import Segment
from l3store.keys import Chain
from l3store.testing.kit import bare

PLACE = "crash-0/kv/all"
_write = os.write  # what a log writes is no change to the store


class Batch:
    """Consecutive pages whose every 16 bytes name the batch and the page: no mixture goes unseen.

    Aligned memory that is used again and again, as engines do.
    """

    def __init__(self, count, size, place=PLACE):
        self.count, self.size, self.place = count, size, place
        memory = memoryview(mmap.mmap(-1, count * size))
        self.pieces = [memory[at : at + size] for at in range(0, count * size, size)]
        self.room = page.frame([(piece,) for piece in self.pieces])

    def keys(self, number):
        return self.chain(number).keys(self.place)

    def chain(self, number):
        return Chain.from_tokens(range(number * 1000, number * 1000 + self.count), 1)

    def sealed(self, number):
        for i, piece in enumerate(self.pieces):
            piece[:] = self._payload(number, i)
        return page.seal(self.place, self.chain(number), [(piece,) for piece in self.pieces])

    def _payload(self, number, i):
        return struct.pack("<QQ", number, i) * (self.size // 16)

    def wrong(self, number, done):
        """Pages that were called read and are not what was stored."""
        return [
            i for i, good in enumerate(done) if good and self.pieces[i] != self._payload(number, i)
        ]


# -- the worker: in the nursery's children --------------------------------------------------------


@dataclass
class Job:
    """What a worker is to do."""

    url: str
    logs: str
    name: int
    """Of this worker; its log is this file."""
    peers: int
    start: int
    """Number of its first batch."""
    count: int = 128
    size: int = 65536
    kill_at: int = 0
    """Die at the so many-th change to a file inside the first `page_set`; 0: never."""
    how: str = "before"
    """Before that change, after it, or when half of it is done."""
    place: str = PLACE
    once: bool = False
    """Only the first `page_set`."""


class Log:
    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, *words):
        line = " ".join(map(str, (time.monotonic_ns(), *words))).replace("\n", " ")
        _write(self._file, line.encode() + b"\n")


class Told:
    """What the log of a worker says, read as it grows."""

    def __init__(self, path):
        self._path, self._at = path, 0

    def more(self):
        """Returns the lines since the last call, each as (stamp, words)."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        rows = [row.split() for row in data.decode().splitlines()]
        return [(int(row[0]), row[1:]) for row in rows]


def work(job):
    log = Log(f"{job.logs}/{job.name}")
    try:
        _tell_of_removals(log)
        if job.once:
            _once(job, log)
        else:
            _forever(job, log)
    except BaseException as error:
        log.say("error", repr(error))
        raise


def _once(job, log):
    batch = Batch(job.count, job.size, job.place)
    with registry.open(job.url) as store:
        pages = batch.sealed(job.start)
        deadly = Deadly(job.kill_at, job.how)
        log.say("begin", job.start)
        done = store.page_set(batch.keys(job.start), pages)
        deadly.harmless()
        log.say("stored", job.start, bits(done))
        log.say("changes", deadly.seen)
        plain = bare(store)
        with plain._catalog.lock:  # what its keeper does in the seconds after
            while plain._estate.shelve_one():
                pass
        for problem in plain.check_integrity():
            log.say("problem", problem)


def _forever(job, log):
    rng, batch = random.Random(job.start), Batch(job.count, job.size, job.place)
    peers = {peer: Told(f"{job.logs}/{peer}") for peer in range(job.peers)}
    last = {}
    with registry.open(job.url) as store:
        plain = bare(store)
        log.say("open")
        number = job.start
        while not os.path.exists(f"{job.logs}/stop"):
            pages = batch.sealed(number)
            log.say("begin", number)
            done = store.page_set(batch.keys(number), pages)
            log.say("stored", number, bits(done))
            if number % 4 == job.start % 4:
                for problem in plain.check_integrity():
                    log.say("problem", problem)
                log.say("checked")
            for peer, told in peers.items():
                for _, words in told.more():
                    if words[0] == "stored":
                        last[peer] = int(words[1])
            wanted = last[rng.choice(list(last))]
            keys = batch.keys(wanted)
            if rng.random() < 0.5:
                done = store.page_get(keys, batch.room)
            else:
                done = plain.page_get(keys, batch.room)
            log.say("read", wanted, bits(done))
            for i in batch.wrong(wanted, done):
                log.say("wrong", wanted, i)
            number += 1
        for problem in plain.check_integrity():
            log.say("problem", problem)
    log.say("closed")


def bits(done):
    return "".join("1" if one else "0" for one in done)


def _tell_of_removals(log):
    tell, clear_if, close = Estate.tell, Segment.clear_if, Estate._close

    def log_and_tell(self, kind, runs, generation=0):
        if kind == journal.DEL:
            _leaving(log, [value for segment, first, count in runs
                           for value in segment.pages[first : first + count]])  # fmt: skip
        tell(self, kind, runs, generation)

    def log_and_clear_if(self, slot, record):
        log.say("damaged", record[32:64].hex())
        return clear_if(self, slot, record)

    def log_and_close(self, segment):
        _leaving(log, segment.pages)
        close(self, segment)

    Estate.tell, Segment.clear_if, Estate._close = log_and_tell, log_and_clear_if, log_and_close


def _leaving(log, pages):
    log.say("leaving", *(value[:8].hex() for value in pages if value is not None))


class Deadly:
    """Kills this process at its so many-th change to a file, with signal 9."""

    CHANGES = ("pwrite", "pwritev", "write", "unlink", "ftruncate", "posix_fallocate", "mkdir")

    def __init__(self, at, how):
        self.seen = 0
        self._at, self._how = at, how
        self._kept = [(os, name, getattr(os, name)) for name in self.CHANGES]
        self._kept.append((os, "open", os.open))
        self._kept.append((growth._libc, "fallocate", growth._libc.fallocate))
        for owner, name, call in self._kept:
            setattr(owner, name, self._wrapped(name, call))

    def harmless(self):
        for owner, name, call in self._kept:
            setattr(owner, name, call)

    def _wrapped(self, name, call):
        def wrapped(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **kwargs)
            self.seen += 1
            if self.seen == self._at:
                if self._how == "after":
                    call(*args, **kwargs)
                elif self._how == "half" and name == "pwrite":
                    call(args[0], args[1][: len(args[1]) // 512 * 256], args[2])
                elif self._how == "half" and name == "pwritev":
                    call(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped


def nursery():
    """Forks a worker for each job that comes in, and says its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no stray is left
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            with suppress(BaseException):
                work(Job(**json.loads(line)))
                code = 0
            os._exit(code)
        print(pid, flush=True)


# -- the test's side ------------------------------------------------------------------------------

WAITING = {"x86_64": ("202", "230"), "aarch64": ("98", "115")}[os.uname().machine]
"""The numbers of futex and clock_nanosleep."""


@dataclass
class Victim:
    """A running worker."""

    pid: int
    handle: int
    job: Job

    def kill(self):
        """Kills it, and returns when it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        self.wait()

    def wait(self, seconds=60.0):
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        gone = poll.poll(seconds * 1000)
        assert gone, f"process {self.pid} does not end"
        os.close(self.handle)

    def calls(self):
        """Numbers of the system calls that its threads are in, but for waiting for each other."""
        found = []
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(OSError):
                    text = Path(f"/proc/{self.pid}/task/{thread}/syscall").read_text()
                    first = text.split()[0]
                    if first not in ("running", "-1", *WAITING):
                        found.append(int(first))
        return found


@dataclass
class Nursery:
    process: subprocess.Popen
    victims: list = field(default_factory=list)

    def start(self, job):
        print(json.dumps(job.__dict__), file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it is gone already
            handle = os.open("/dev/null", os.O_RDONLY)
        victim = Victim(pid, handle, job)
        self.victims.append(victim)
        return victim


@contextmanager
def opened_nursery():
    """A nursery; all its workers are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Nursery(process)
    finally:
        process.kill()
        process.communicate()


class Siege:
    """Writers and readers on one small store, one of which is killed again and again."""

    workers, capacity = 4, 256 << 20

    def __init__(self, nursery, folder, *, seed, options=""):
        self._nursery, self._folder = nursery, folder
        self._rng = random.Random(seed)
        self._url = (
            f"nvme://{folder}/store?capacity={self.capacity}&segment=16MiB&writers={self.workers}"
            f"&deadline=60s{options}"
        )
        (folder / "logs").mkdir()
        self._told = [Told(folder / "logs" / str(name)) for name in range(self.workers)]
        self._batch = Batch(128, 65536)
        self._stored = [{} for _ in range(self.workers)]  # number -> which pages, as it was told
        self._begun = [name * 1_000_000 for name in range(self.workers)]
        self._left = {}  # page -> since when it may be gone
        self._calls = [0] * self.workers
        self.faults = []
        """What must not be, in words."""
        self.counts = dict.fromkeys(
            ("kills", "inside", "stored", "read", "recycled", "checked", "opened", "closed"), 0
        )
        registry.open(self._url).close()
        self._witness = registry.open(f"{self._url}&mode=ro")
        self._victims = [self._start(name) for name in range(self.workers)]

    def _start(self, name):
        job = Job(
            self._url, str(self._folder / "logs"), name, self.workers, self._begun[name] + 1
        )  # fmt: skip
        return self._nursery.start(job)

    # -- what they tell

    def _take_in(self):
        news = [line for name, told in enumerate(self._told)
                for line in self._taken(name, told.more())]  # fmt: skip
        for stamp, number, done in news:  # after all that is said to have left
            for page_ in self._missing(number, done):
                if not self._left.get(page_, stamp) < stamp:
                    self.faults.append(f"page {page_} of batch {number} was not read")
                self.counts["recycled"] += 1

    def _taken(self, name, lines):
        for stamp, (word, *rest) in lines:
            if word == "begin":
                self._begun[name] = int(rest[0])
            elif word == "stored":
                self._calls[name] += 1
                self.counts["stored"] += 1
                self._stored[name][int(rest[0])] = rest[1]
                if "0" in rest[1]:
                    self.faults.append(f"batch {rest[0]} was stored in part: {rest[1]}")
            elif word == "leaving":
                for page_ in rest:
                    self._left.setdefault(page_, stamp)
            elif word == "read":
                self.counts["read"] += 1
                if "0" in rest[1]:
                    yield stamp, int(rest[0]), [one == "1" for one in rest[1]]
            elif word in ("open", "closed", "checked"):
                self.counts[word + "ed" * (word == "open")] += 1
            else:
                self.faults.append(f"worker {name}: {word} {' '.join(rest)}")

    def _missing(self, number, done):
        hashes = self._batch.chain(number).hashes
        return [value[:8].hex() for value, good in zip(hashes, done, strict=True) if not good]

    # -- rounds

    def round(self):
        """One of them is killed; what it told is true, and the others go on."""
        name = self._rng.randrange(self.workers)
        time.sleep(self._rng.random() * 0.1)
        calls = self._victims[name].calls()
        if self.counts["kills"] % 2:  # the other half comes when it comes
            until = time.monotonic() + 0.2
            while not calls and time.monotonic() < until:
                calls = self._victims[name].calls()
        self._victims[name].kill()
        self.counts["kills"] += 1
        self.counts["inside"] += bool(calls)
        self._take_in()
        before = list(self._calls)
        self._look(name)
        self._victims[name] = self._start(name)
        self._wait_for(lambda: all(
            now > then for i, (now, then) in enumerate(zip(self._calls, before, strict=True))
            if i != name or self._rng.random() < 0.2
        ))  # fmt: skip

    def _wait_for(self, what):
        until = time.monotonic() + 60
        while not what() and not self.faults:
            if time.monotonic() > until:
                self.faults.append("some did not go on")
            time.sleep(0.01)
            self._take_in()

    def _look(self, dead):
        """From outside: a process that was there all the time, and one that begins now."""
        sizes = [file.stat().st_size for file in (self._folder / "store").glob("seg-*")]
        if sum(sizes) > self.capacity:
            self.faults.append(f"{sum(sizes)} bytes in segments")
        with registry.open(f"{self._url}&mode=ro") as fresh:
            for who, store in (("witness", self._witness), ("fresh", fresh)):
                problems = bare(store).check_integrity()
                self.faults += [f"{who}: {problem}" for problem in problems]
            for name, stored in enumerate(self._stored):
                for number in list(stored):
                    keys = self._batch.keys(number)
                    if name == dead:
                        done = fresh.page_get(keys, self._batch.room)
                        wrong = self._batch.wrong(number, done)
                        self.faults += [f"batch {number} page {i} is wrong" for i in wrong]
                    else:
                        done = fresh.exists_each(keys)
                    seen = self._witness.exists_each(keys)
                    self._take_in()
                    for what, found in (("there", done), ("seen by a peer", seen)):
                        self.faults += [
                            f"page {one} of batch {number} is not {what}"
                            for one in self._missing(number, found)
                            if one not in self._left
                        ]
                    if not any(done):
                        del stored[number]

    def end(self):
        """All stop by themselves."""
        (self._folder / "logs" / "stop").touch()
        for victim in self._victims:
            victim.wait()
        self._take_in()
        for name in range(self.workers):
            self._look(name)
        self._witness.close()
        with registry.open(self._url) as store:
            self.faults += bare(store).check_integrity()


if __name__ == "__main__":
    nursery()
