"""An S3 server in memory, as fast as one Python thread allows: to see what clients can do.

    python bench/s3/stub.py [--port N] [--capacity BYTES]

It prints its port and serves until it is killed. It asks nobody who he is, knows one bucket of
whatever name, and what pages, tools and tests ask for: GET with ranges, HEAD, PUT and
DELETE with If-Match and If-None-Match, DeleteObjects, ListObjectsV2. Bodies go out of and come into
the memory they stay in. Under ``/-/`` it is told to fail (`faults`), and says what it was asked.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import re
import selectors
import socket
from collections import Counter
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_HEAD_MAX = 1 << 16
_BUFFER = 4 << 20
_TICK = 0.01  # seconds between two pieces of a body that trickles
_KEYS = re.compile(rb"<Key>([^<]*)</Key>")
_DATE = "Mon, 30 Nov 2026 12:00:00 GMT"
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found"}


class Connection:
    """One client's: a request on its way in, and an answer on its way out."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.head = bytearray()
        self.request: tuple[str, str, dict[str, str]] | None = None
        self.body = bytearray()
        self.missing = 0  # bytes of the body
        self.out: list[memoryview] = []
        self.close_after = False
        self.trickle = 0  # bytes a tick; 0: all at once
        self.events = _READ


class Stub:
    """The server. One thread."""

    def __init__(self, port: int = 0, capacity: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._capacity, self._used = capacity, 0
        self._objects: dict[str, tuple[bytes, str]] = {}  # path -> (body, ETag)
        self._numbers = itertools.count(1)
        self._asked: Counter[str] = Counter()
        self._faults: list[dict] = []
        self._selector = selectors.DefaultSelector()
        self._trickling: set[Connection] = set()

    def serve(self) -> None:
        self._selector.register(self._listener, _READ)
        while True:
            for key, events in self._selector.select(_TICK if self._trickling else None):
                if key.data is None:
                    self._accept()
                else:
                    self._served(key.data, events)
            for one in tuple(self._trickling):
                self._served(one, _WRITE)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._selector.register(sock, _READ, Connection(sock))

    def _served(self, one: Connection, events: int) -> None:
        try:
            if events & _READ and not self._take(one):
                self._drop(one)
                return
            if one.out:
                self._give(one)
            wanted = _WRITE if one.out and not one.trickle else 0 if one.out else _READ
            if wanted != one.events:
                self._watch(one, wanted)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(one)

    def _watch(self, one: Connection, wanted: int) -> None:
        if not wanted:
            self._selector.unregister(one.sock)
        elif not one.events:
            self._selector.register(one.sock, wanted, one)
        else:
            self._selector.modify(one.sock, wanted, one)
        one.events = wanted

    def _drop(self, one: Connection) -> None:
        if one.events:
            self._selector.unregister(one.sock)
            one.events = 0
        self._trickling.discard(one)
        one.sock.close()

    # -- bytes in and out ------------------------------------------------------------------

    def _take(self, one: Connection) -> bool:
        """Reads; False when the client has left."""
        if one.missing:
            view = memoryview(one.body)
            while one.missing:
                got = one.sock.recv_into(view[len(view) - one.missing :])
                if not got:
                    return False
                one.missing -= got
        else:
            data = one.sock.recv(_HEAD_MAX)
            if not data:
                return False
            one.head += data
            end = one.head.find(b"\r\n\r\n")
            if end < 0:
                return len(one.head) < _HEAD_MAX
            self._begin(one, end)
        if one.request is not None and not one.missing:
            request, one.request = one.request, None
            self._answer(one, *request, one.body)
            one.body = bytearray()
        return True

    def _begin(self, one: Connection, end: int) -> None:
        first, *lines = one.head[:end].decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", 0))
        rest = one.head[end + 4 :]
        one.head = bytearray()
        one.body = bytearray(length)
        one.body[: len(rest)] = rest
        one.missing = length - len(rest)
        one.request = method, path, headers
        if headers.get("expect") == "100-continue":
            one.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _give(self, one: Connection) -> None:
        if one.trickle:
            piece = one.out[0][: one.trickle]
            sent = one.sock.send(piece)
        else:
            sent = one.sock.sendmsg(one.out[:8])
        while sent and one.out:
            took = min(sent, len(one.out[0]))
            one.out[0] = one.out[0][took:]
            sent -= took
            if not one.out[0]:
                one.out.pop(0)
        if not one.out:
            self._trickling.discard(one)
            one.trickle = 0
            if one.close_after:
                raise OSError(errno.ECONNRESET, "told to cut it")

    def _reply(
        self, one: Connection, status: int, body: bytes | memoryview = b"",
        headers: str = "", *, length: int | None = None,
    ) -> None:  # fmt: skip
        size = len(body) if length is None else length
        told = f"Content-Length: {size}\r\n" if size >= 0 else ""
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Refused')}\r\n{told}"
            f"Last-Modified: {_DATE}\r\n{headers}\r\n"
        ).encode("latin-1")
        one.out = [memoryview(head)]
        if len(body):
            one.out.append(memoryview(body))

    def _refuse(self, one: Connection, status: int, code: str, *, bare: bool = False) -> None:
        text = f"<Error><Code>{code}</Code><Message>the stub says so</Message></Error>"
        self._reply(
            one, status, b"" if bare else text.encode(), "Content-Type: application/xml\r\n"
        )

    # -- requests ---------------------------------------------------------------------------

    def _answer(
        self, one: Connection, method: str, path: str, headers: dict[str, str], body: bytearray
    ) -> None:
        if path.startswith("/-/"):
            self._told(one, path[3:], body)
            return
        where, _, query = path.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        kind = method
        if "list-type" in options:
            kind = "LIST"
        elif "delete" in options:
            kind = "DELETE"
        self._asked[kind] += 1
        name = unquote(where)
        fault = self._fault(kind, options.get("prefix", "") if kind == "LIST" else name)
        if fault is not None and "status" in fault:
            self._refuse(one, fault["status"], fault.get("code", ""), bare=method == "HEAD")
        elif kind == "LIST":
            self._list(one, options, fault or {})
        elif kind == "DELETE" and method == "POST":
            self._delete_several(one, name.rstrip("/"), headers, body, fault or {})
        elif kind == "PUT":
            self._put(one, name, headers, bytes(body), fault or {})
        elif name not in self._objects:
            self._refuse(one, 404, "NoSuchKey", bare=method == "HEAD")
        elif kind == "DELETE":
            heeded = "" if (fault or {}).get("conditions") == "ignore" else headers.get("if-match")
            if heeded and heeded != self._objects[name][1]:
                self._refuse(one, 412, "PreconditionFailed")
                return
            self._remove(name)
            self._reply(one, 204)
        else:
            self._get(one, name, headers, method, fault or {})
        if fault is not None and "trickle" in fault:
            one.trickle = max(1, int(fault["trickle"] * _TICK))
            self._trickling.add(one)
        if fault is not None and "cut" in fault:
            one.out = _first(one.out, fault["cut"])
            one.close_after = True
            if not one.out:
                raise OSError(errno.ECONNRESET, "told to cut it")

    def _get(
        self, one: Connection, name: str, headers: dict[str, str], method: str, fault: dict
    ) -> None:
        body, tag = self._objects[name]
        view, status, more = memoryview(body), 200, f"ETag: {tag}\r\n"
        if (asked := headers.get("range")) is not None:
            start, _, last = asked.removeprefix("bytes=").partition("-")
            if int(start) >= len(body):
                self._refuse(one, 416, "InvalidRange")
                return
            end = min(int(last) + 1 if last else len(body), len(body))
            status, view = 206, view[int(start) : end]
            more += f"Content-Range: bytes {start}-{end - 1}/{len(body)}\r\n"
        if method == "HEAD":
            self._reply(one, 200, b"", more, length=len(body))
            return
        length = len(view) + fault["length"] if "length" in fault else None
        self._reply(one, status, view, more, length=length)
        one.close_after = length is not None

    def _put(
        self, one: Connection, name: str, headers: dict[str, str], body: bytes, fault: dict
    ) -> None:
        condition = headers.get("if-none-match")
        if condition and fault.get("conditions") == "refuse":
            self._refuse(one, 501, "NotImplemented")
            return
        if condition and fault.get("conditions") != "ignore" and name in self._objects:
            self._refuse(one, 412, "PreconditionFailed")
            return
        before = len(self._objects[name][0]) if name in self._objects else 0
        large = len(body) > 256  # a store's own small objects find room
        if self._capacity and large and self._used - before + len(body) > self._capacity:
            self._refuse(one, 507, "XMinioStorageFull")
            return
        self._remove(name)
        tag = f'"{next(self._numbers):032x}"'
        self._objects[name] = body, tag
        self._used += len(body) if large else 0
        self._reply(one, 200, b"", f"ETag: {tag}\r\n")

    def _remove(self, name: str) -> None:
        body, _ = self._objects.pop(name, (b"", ""))
        self._used -= len(body) if len(body) > 256 else 0

    def _delete_several(
        self, one: Connection, bucket: str, headers: dict[str, str], body: bytearray, fault: dict
    ) -> None:
        if "content-md5" not in headers:
            self._refuse(one, 400, "MissingContentMD5")
            return
        code = fault.get("kept")
        kept = b""
        for key in _KEYS.findall(body):
            if code and fault.get("key", "") in key.decode():
                kept += b"<Error><Key>%s</Key><Code>%s</Code></Error>" % (key, code.encode())
            else:
                self._remove(f"{bucket}/{unquote(key.decode())}")
        self._reply(one, 200, b"<DeleteResult>%s</DeleteResult>" % kept)

    def _list(self, one: Connection, options: dict[str, str], fault: dict) -> None:
        most, start = int(options.get("max-keys", 1000)), options.get("prefix", "")
        after = options.get("continuation-token", "")
        names = sorted(
            name for path in self._objects
            if (name := path.split("/", 2)[2]).startswith(start) and name > after
        )  # fmt: skip
        bucket = next(iter(self._objects), "//").split("/")[1]
        coded = quote if options.get("encoding-type") == "url" else escape
        rows = "".join(
            f"<Contents><Key>{coded(name)}</Key><Size>{len(self._objects[f'/{bucket}/{name}'][0])}"
            "</Size></Contents>"
            for name in names[:most]
        )
        more = len(names) > most or "token" in fault
        token = fault.get("token", escape(names[most - 1]) if len(names) > most else "")
        text = (
            '<?xml version="1.0"?><ListBucketResult>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>{rows}"
            "<EncodingType>url</EncodingType></ListBucketResult>"
        )
        self._reply(one, 200, text.encode())

    # -- what it is told --------------------------------------------------------------------

    def _told(self, one: Connection, what: str, body: bytearray) -> None:
        """``faults`` sets what goes wrong, ``asked`` counts requests anew, ``clear`` removes all.

        A fault is a JSON object: ``on`` (a method, LIST or all), ``name`` (part of an object's, or
        of what is listed), ``unless`` (how names begin that are spared), ``times``, and ``status``
        with ``code``, ``cut`` (bytes of the answer until the connection is closed), ``length``
        (added to what Content-Length says), ``trickle`` (bytes a second), ``conditions``
        (``refuse`` or ``ignore``), ``token`` (what each list says it goes on with) or ``kept`` (a
        code; with ``key``, part of those that are not removed with others).
        """
        if what == "faults":
            self._faults = json.loads(body)
        elif what == "clear":
            self._objects.clear()
            self._used = 0
        asked, self._asked = self._asked, Counter()
        self._reply(one, 200, json.dumps(asked).encode())

    def _fault(self, kind: str, name: str) -> dict | None:
        for fault in self._faults:
            matches = fault.get("on", kind) == kind and fault.get("name", "") in name
            matches = matches and not ("unless" in fault and name.startswith(fault["unless"]))
            if matches and fault.setdefault("times", 1 << 60) > 0:
                fault["times"] -= 1
                return fault
        return None


def _first(pieces: list[memoryview], count: int) -> list[memoryview]:
    kept = []
    for piece in pieces:
        kept.append(piece[:count])
        count -= len(kept[-1])
    return [piece for piece in kept if piece]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/s3/stub.py", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--capacity", type=int, default=0, help="bytes; 0: what memory holds")
    given = parser.parse_args()
    stub = Stub(given.port, given.capacity)
    print(stub.port, flush=True)
    stub.serve()


if __name__ == "__main__":
    main()
