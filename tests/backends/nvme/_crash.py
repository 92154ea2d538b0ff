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
from l3store.backends.nvme import growth
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
        self.lines = []

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
        lines = [(int(row[0]), row[1:]) for row in rows]
        self.lines += lines
        return lines


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
        for problem in bare(store).check_integrity():
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
    clear, clear_if, close = Segment.clear, Segment.clear_if, Estate._close

    def clear_and_tell(self, first, count):
        _leaving(log, self.pages[first : first + count])
        clear(self, first, count)

    def clear_if_and_tell(self, slot, record):
        log.say("damaged", record[32:64].hex())
        return clear_if(self, slot, record)

    def close_and_tell(self, segment):
        _leaving(log, segment.pages)
        close(self, segment)

    Segment.clear, Segment.clear_if, Estate._close = (
        clear_and_tell, clear_if_and_tell, close_and_tell
    )  # fmt: skip


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
        """Numbers of the system calls that its threads are in; empty: all of them compute."""
        found = []
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(OSError):
                    text = Path(f"/proc/{self.pid}/task/{thread}/syscall").read_text()
                    first = text.split()[0]
                    if first not in ("running", "-1"):
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


if __name__ == "__main__":
    nursery()
