"""What the server's helper says when the admin port does not answer as it should."""

from __future__ import annotations

import socket
import threading

import pytest

from l3store.servers.mooncake import MooncakeServer


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_an_oserror_so_that_who_waits_asks_again(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = object.__new__(MooncakeServer)
        server.admin_port = listener.getsockname()[1]

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError):
            server.segments()
        thread.join(10)
