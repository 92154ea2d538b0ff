"""A `Proxy` in a process of its own.

Mooncake's library holds the interpreter's lock while it is set up: a proxy in a thread of the same
process could not pass what that waits for.
"""

from __future__ import annotations

import json
import subprocess
import sys

_SERVE = """
import json, sys
from l3store.testing.proxy import Proxy
with Proxy(("127.0.0.1", int(sys.argv[1]))) as proxy:
    print(json.dumps(proxy.port), flush=True)
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        arguments = [bytes.fromhex(one) if isinstance(one, str) else one for one in arguments]
        found = getattr(proxy, name)
        if callable(found):
            found = found(*arguments, **options)
        print(json.dumps(found), flush=True)
"""


class ProxyAway:
    """Forwards to a port of 127.0.0.1; what it can is in `l3store.testing.proxy.Proxy`."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = "127.0.0.1", self._answer()

    @property
    def accepted(self):
        return self._ask("accepted")

    @property
    def passed(self):
        return self._ask("passed")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self._ask(name, *arguments, **options)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, name, *arguments, **options):
        arguments = [one.hex() if isinstance(one, bytes) else one for one in arguments]
        print(json.dumps([name, arguments, options]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        return json.loads(self._process.stdout.readline())
