"""What every wrapper shares: it hands on whatever it does not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.abc import Backend, Capabilities, Check, PlaceUsage, Segments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from l3store.config import StoreURL

__all__ = ["Wrapper"]


class Wrapper(Backend):
    """Hands every call on to `inner`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        """Wrappers have no address: open the store and wrap it."""
        raise NotImplementedError(f"{cls.__name__} wraps a backend and cannot be opened at {url}")

    def batch_exists(self, keys: Sequence[str]) -> int:
        return self.inner.batch_exists(keys)

    def exists_each(self, keys: Sequence[str]) -> list[bool]:
        return self.inner.exists_each(keys)

    def page_get(
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        return self.inner.page_get(keys, into, check)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:
        return self.inner.page_set(keys, pages)

    def put_meta(self, name: str, data: bytes) -> None:
        self.inner.put_meta(name, data)

    def get_meta(self, name: str) -> bytes | None:
        return self.inner.get_meta(name)

    def list_meta(self) -> list[str]:
        return self.inner.list_meta()

    def scan(self, place: str | None = None) -> Iterator[str]:
        return self.inner.scan(place)

    def usage(self) -> list[PlaceUsage]:
        return self.inner.usage()

    def delete(
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        return self.inner.delete(keys, headers)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.inner.headers(keys)

    def register_buffer(self, buffer: memoryview) -> None:
        self.inner.register_buffer(buffer)

    def health(self) -> None:
        self.inner.health()

    def details(self) -> dict[str, str | int | float]:
        return self.inner.details()

    def close(self) -> None:
        self.inner.close()
