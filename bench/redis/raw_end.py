"""The far end of the raw connections: memory behind a socket, in a process of its own.

    python raw_end.py UNIX_PATH BYTES

Prints its TCP port. A request is 24 bytes: 0 to read or 1 to write, where in the memory, how many
bytes. What is read follows at once; a write is answered by one byte. One thread a connection.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys
from threading import Thread

REQUEST = struct.Struct("<QQQ")
READ, WRITE = 0, 1


def main() -> None:
    memory = memoryview(mmap.mmap(-1, int(sys.argv[2])))
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(sys.argv[1])
    listeners[1].listen()
    for listener in listeners:
        Thread(target=_accept, args=(listener, memory), daemon=True).start()
    print(listeners[0].getsockname()[1], flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket, memory: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Thread(target=_talk, args=(connection, memory), daemon=True).start()


def _talk(connection: socket.socket, memory: memoryview) -> None:
    asked = bytearray(REQUEST.size)
    with connection:
        while connection.recv_into(asked, REQUEST.size, socket.MSG_WAITALL) == REQUEST.size:
            what, at, count = REQUEST.unpack(asked)
            part = memory[at : at + count]
            if what == READ:
                connection.sendall(part)
            elif connection.recv_into(part, count, socket.MSG_WAITALL) == count:
                connection.sendall(b"!")
            else:
                return


if __name__ == "__main__":
    main()
