"""What is known of a store while its master is one process: a new one may know nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from l3store.backends._lengths import Lengths, parse_length
from l3store.backends.mooncake.small import Small
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from l3store.backends.mooncake.client import Client

__all__ = ["Life"]

FORMAT = 1


class _Marker(msgspec.Struct):
    kind: str
    format: int


class Life:
    """Marker, lengths and descriptors of a store, as this life of its master has them.

    Blocks for one read. Thread-safe.

    Raises:
        ConfigError: What stands under the prefix is no store of this kind and format.
        BackendUnavailable: The store does not answer.
    """

    def __init__(self, client: Client, prefix: str) -> None:
        self.number = client.line.lives
        """Which life; compare with ``client.line.lives``."""
        client.check()
        self._client, self._prefix = client, prefix
        self.small = Small(client, prefix)
        self.lengths = Lengths(self._length, self._claim)
        self._marked = self._marker_is_there()

    def mark(self) -> None:
        """Makes the marker where it is missing; before anything else is written.

        Raises:
            CapacityError: There is no memory for it.
            ConfigError: Another process was first, with a store of another kind or format.
        """
        if not self._marked:
            self.small.claim("store", msgspec.json.encode(_Marker("mooncake", FORMAT)))
            self._marked = self._marker_is_there()

    def _marker_is_there(self) -> bool:
        where = f"{self._prefix!r} at Mooncake's {self._client.settings.master}"
        data = self.small.get("store")
        if data is None:
            return False
        try:
            marker = msgspec.json.decode(data, type=_Marker)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"store {where}: its marker describes no store: {error}") from error
        if (marker.kind, marker.format) != ("mooncake", FORMAT):
            raise ConfigError(
                f"store {where} is of kind {marker.kind!r} and format {marker.format}; this "
                f"version reads format {FORMAT}: choose another prefix, or remove what is there"
            )
        return True

    def owners(self) -> set[str]:
        """Returns where the marker lies; nowhere when there is none.

        Raises:
            BackendUnavailable: The store does not answer.
        """
        found = self._client.call("batch_get_replica_desc", [f"{self._prefix}/store"])
        return {
            one.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for replicas in found.values()
            for one in replicas
            if one.is_memory_replica()
        }

    def _length(self, place: str) -> int | None:
        text = self.small.get(f"length/{place}")
        where = f"{self._prefix}/length/{place}"
        return None if text is None else parse_length(text, where)

    def _claim(self, place: str, length: int) -> None:
        self.small.claim(f"length/{place}", b"%d" % length)
