"""The peer's side of a pairing: stores, reads and looks up batches when told to, and times itself.

Runs in a peer's own environment, where l3store is not installed: only the standard library here and
in bench/common, which is on the path, and the file that makes payloads, which needs nothing else.

One request a line: ``put|get|exists FIRST COUNT``, about pages by number, ``drop`` (its files out
of the page cache), ``clear`` (all pages away), ``quit``. One line of JSON as answer: wall and CPU
seconds of the timed part (all threads of this process), pages done, and of pages read how many have
a wrong byte. Keys are made, bytes made and compared outside the timed part.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from disk import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Peer", "serve"]


class Peer:
    """What a driver offers. `buffers` are one for each page slot; all calls block."""

    buffers: Sequence[memoryview]

    def keys(self, hashes: Sequence[bytes]) -> Sequence[Any]:
        """The names of pages, as the peer's callers have them at hand."""
        raise NotImplementedError

    def put(self, keys: Sequence[Any], slots: range) -> int:
        """Stores pages; returns how many."""
        raise NotImplementedError

    def get(self, keys: Sequence[Any], slots: range) -> int:
        """Reads pages into their buffers; returns how many."""
        raise NotImplementedError

    def exists(self, keys: Sequence[Any]) -> int:
        """How many of the pages, from the first to the first hole, are there."""
        raise NotImplementedError

    def release(self, keys: Sequence[Any]) -> None:
        """Gives back what `exists` took; not timed."""

    def clear(self) -> None:
        """Removes all pages; not timed."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends it."""


def serve(make: Callable[[argparse.Namespace, Any], Peer]) -> None:
    """Answers requests until ``quit`` or the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peer's own code prints must not stand between answers
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="")
    parser.add_argument("--address", default="", help="of a server: host:port")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--page-bytes", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="buffers, in pages")
    parser.add_argument("--pages", type=int, required=True, help="most pages stored at one time")
    parser.add_argument("--payload", required=True, help="the file with class Payloads")
    given = parser.parse_args()
    spec = importlib.util.spec_from_file_location("payload", given.payload)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{given.payload} is no Python file")
    payload = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(payload)
    session = _Session(make(given, payload), payload.Payloads(given.page_bytes, 0), given.dir)
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "quit":
            break
        first, count = map(int, numbers) if numbers else (0, 0)
        _answer(answers, session.handle(what, range(first, first + count)))
    session.peer.close()


def _answer(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


class _Session:
    def __init__(self, peer: Peer, payloads: Any, folder: str) -> None:
        self.peer, self._payloads, self._files = peer, payloads, Files(folder)

    def handle(self, what: str, pages: range) -> dict[str, Any]:
        peer, payloads, wrong = self.peer, self._payloads, 0
        hashes = [hashlib.sha256(b"peer %d" % number).digest() for number in pages]
        start = pages.start % len(peer.buffers)
        slots = range(start, start + len(pages))
        if what == "drop":
            self._files.drop()
            return {}
        if what == "clear":
            peer.clear()
            self._files.forget()
            return {}
        keys = peer.keys(hashes)
        if what == "exists":
            answer = _timed(lambda: peer.exists(keys))
            peer.release(keys)
            return answer
        buffers = peer.buffers[slots.start : slots.stop]
        if what == "put":
            for value, buffer in zip(hashes, buffers, strict=True):
                payloads.write(value, buffer)
            answer = _timed(lambda: peer.put(keys, slots))
            self._files.sync()  # or the other side would pay for this one's write-back
        elif what == "get":
            for buffer in buffers:
                payloads.poison(buffer)
            answer = _timed(lambda: peer.get(keys, slots))
            for value, buffer in zip(hashes, buffers, strict=True):
                wrong += not payloads.matches(value, buffer)
        else:
            raise SystemExit(f"unknown request {what!r}")
        return {**answer, "wrong": wrong}


def _timed(call: Callable[[], int]) -> dict[str, Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    done = call()
    took = time.perf_counter() - wall
    return {"wall": took, "cpu": time.process_time() - cpu, "done": done}
