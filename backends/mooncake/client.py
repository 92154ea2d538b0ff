"""One client of the library for all stores of this process that reach one master alike.

Setting it up takes 40 ms, and ending it up to 1 s (with a dead master 15 s), in both of which the
library holds the interpreter's lock: the whole process stands still. So a client that is no longer
used is kept for the next one that opens the same, about 20 threads and 10 descriptors, and ends
with the process. Only one that lends memory is ended when its last store closes.
"""

from __future__ import annotations

import os
import time
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from l3store.backends.mooncake.library import check_wheels, code_name, new_store
from l3store.backends.mooncake.line import Line
from l3store.backends.mooncake.memory import Copies, Registered, Scratch
from l3store.backends.mooncake.sessions import Sessions
from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.backends.mooncake.options import Address, MooncakeOptions

__all__ = ["Client", "Settings", "connect", "give_back"]

RPC_FAIL, RPC_TIMEOUT = -900, -901
_SETTLED = 0.05  # seconds that a master gets for what it found in its queue
_DEAD = 16  # connections of the library's that a master may have left behind
_GONE = 2  # of the library's health_check: the master does not answer its heartbeat


class Settings(NamedTuple):
    """What two stores must have in common to share a client."""

    master: Address
    protocol: str
    device: str
    metadata: str
    host: str
    segment: int
    local_buffer: int
    timeout: float
    connect_timeout: float

    @classmethod
    def of(cls, master: Address, options: MooncakeOptions) -> Settings:
        """Returns those of a store."""
        return cls(
            master, options.protocol or "tcp", options.device or "",
            options.metadata or "P2PHANDSHAKE", options.host or "", options.segment or 0,
            options.local_buffer or 0, options.timeout,
            options.connect_timeout,
        )  # fmt: skip


class Client:
    """The library's client, guarded.

    It is never called before it is set up or after its end, which would crash the process, nor when
    the master is known to be gone, which would block for seconds.

    Raises:
        BackendUnavailable: No master answers at the address.
        ConfigError: The library refuses protocol or device.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.users = 0
        self._ended = False
        self._process = os.getpid()
        self.line = Line(settings.master, settings.connect_timeout)
        try:
            self._store: Any = _set_up(settings, self.line.own_address())
        except BaseException:
            self.line.close()
            raise
        self._was_late = False  # the master may have calls of ours in its queue
        self._greeted = 0  # the life of the master that has answered last
        self.registered = Registered(self._store)
        self.scratch = Scratch(self.registered)
        self.copies = Copies(self.registered)
        self.sessions = Sessions(self.call)

    def check(self) -> None:
        """Returns when a call may be made; a few microseconds, or what reaching the master takes.

        Raises:
            BackendUnavailable: The master is gone, this process was forked, or `end` was called.
        """
        self.check_here()
        self.line.check()
        if self._store.health_check() == _GONE:
            raise BackendUnavailable(
                f"the Mooncake master at {self.settings.master} does not answer heartbeats"
            )
        if self._greeted != self.line.lives:
            self._greet()

    def check_here(self) -> None:
        """Returns when the library may be called about this process; asks nobody.

        Raises:
            BackendUnavailable: This process was forked, or `end` was called.
        """
        if self._ended:
            raise BackendUnavailable("Mooncake's client is closed")
        if self.forked:
            raise BackendUnavailable(
                "the store was opened before this process was forked, and Mooncake's library does "
                "not survive that: start processes with the method 'spawn'"
            )

    @property
    def forked(self) -> bool:
        """True in a child of the process that made this: the library crashes there."""
        return os.getpid() != self._process

    def _greet(self) -> None:
        """Asks the master anything, after it was reached anew or was late.

        So what changes something is not sent to a master that stands still: it would find and do it
        when it goes on, long after the caller was told that it had failed. And the library notices
        only when it uses one of its connections that it was left behind by a dead master.
        """
        lives = self.line.lives
        code = RPC_FAIL
        for _ in range(_DEAD):
            (code,) = self._store.batch_is_exist(["l3store"])
            if code != RPC_FAIL:
                break
        if code < 0:
            raise self.failed(code, "asking anything")
        if self._was_late:
            time.sleep(_SETTLED)
            self._was_late = False
        self._greeted = lives

    def call(self, name: str, *arguments: object) -> Any:
        """Calls the library and returns what it says. Blocks without the interpreter's lock.

        Raises:
            BackendUnavailable: As `check`; nothing was called then.
        """
        self.check()
        return getattr(self._store, name)(*arguments)

    def failed(self, code: int, what: str, done: Sequence[bool] = ()) -> Exception:
        """Returns the error that a negative code of the library means."""
        text = f"Mooncake at {self.settings.master}: {what}: {code_name(code)}"
        if code == RPC_TIMEOUT:
            self._greeted, self._was_late = 0, True
            return BackendTimeout(
                f"{text}: the master did not answer within {self.settings.timeout:g} s", done=done
            )
        if code == RPC_FAIL:
            self.line.doubt()
        return BackendUnavailable(text, done=done)

    def end(self) -> None:
        """Ends the library's client; nothing may run on it."""
        self._ended = True
        self._store.close()
        self._store = None  # frees what it lent, at once
        self.registered.end()
        self.line.close()


_lock = Lock()
_clients: dict[Settings, Client] = {}


def connect(settings: Settings) -> Client:
    """Returns the client that this process has for `settings`, and makes it where there is none.

    Blocks until the master has answered, at most about `connect_timeout` + `timeout`.

    Raises:
        BackendUnavailable: No master answers.
        ConfigError: The library refuses protocol or device, several wheels are installed, or it
            was loaded before this process was forked.
    """
    check_wheels()
    with _lock:
        client = _clients.get(settings)
        if client is None:
            client = _clients[settings] = Client(settings)
        else:
            client.check()
        client.users += 1
        return client


def give_back(client: Client, *, idle: bool) -> None:
    """Says that one store needs a client no more.

    Args:
        client: From `connect`.
        idle: No call of that store runs any more; else the client is left as it is for good.
    """
    with _lock:
        client.users -= 1
        if idle and not client.users and client.settings.segment:
            del _clients[client.settings]
            client.end()


def _set_up(settings: Settings, own: str) -> Any:
    def attempt(
        host: str, metadata: str, segment: int, local_buffer: int, protocol: str, device: str
    ) -> Any | None:
        bounds = {
            "MC_RPC_TIMEOUT_MS": settings.timeout,
            "MC_RPC_CONNECT_TIMEOUT_MS": settings.connect_timeout,
        }
        return new_store(
            bounds, host, metadata, segment, local_buffer, protocol, device, str(settings.master)
        )

    asked = (
        settings.host or own, settings.metadata, settings.segment, settings.local_buffer,
        settings.protocol, settings.device,
    )  # fmt: skip
    plain = (own, "P2PHANDSHAKE", 0, 0, "tcp", "")
    store = attempt(*asked)
    if store is not None:
        return store
    if asked != plain and attempt(*plain) is not None:
        raise ConfigError(
            f"Mooncake cannot be set up with protocol={settings.protocol}, "
            f"device={settings.device or 'any'}, metadata={settings.metadata}, host={asked[0]}, "
            f"segment={settings.segment}, local_buffer={settings.local_buffer}, while protocol=tcp "
            "without all these works; MC_LOG_LEVEL=INFO in the environment shows why"
        )
    raise BackendUnavailable(
        f"what listens at {settings.master} does not answer as a Mooncake master; "
        "its RPC port is meant (50051), not that of its metrics; MC_LOG_LEVEL=INFO in the "
        "environment shows more"
    )
