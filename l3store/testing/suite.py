"""What an author gives, and the fixtures that every test of the suite uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from l3store import registry
from l3store.testing.plugin import LacksCapability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from l3store.abc import Backend

__all__ = ["Suite"]


class Suite:
    """The part of `BackendSuite` that an author fills in.

    Raises:
        TypeError: A subclass replaces a test of the suite: a promise that is not tested is not
            kept, and a capability that is not declared is how to leave tests out.
    """

    evicts: ClassVar[bool] = False
    """The store of `small_url` makes room by dropping old pages, instead of refusing new ones."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            inherited = getattr(super(cls, cls), name, None)
            if name.startswith("test") and getattr(inherited, "pytestmark", None):
                raise TypeError(f"{cls.__name__} replaces {name}, a test of the conformance suite")

    def url(self, tmp_path: Path) -> str:
        """Returns the URL of an empty store of this test's own."""
        raise NotImplementedError("give the URL of an empty store")

    def raw_read(self, backend: Backend, key: str) -> bytes | None:
        """Reads a page's bytes, header first, behind the backend's back; None where absent.

        Args:
            backend: The open bare backend (a store that other programs can reach ignores it).
            key: The object name.
        """
        raise NotImplementedError("read the page's bytes without the backend")

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        """Replaces a stored page's bytes by `data`, of any length, behind the backend's back."""
        raise NotImplementedError("overwrite the page's bytes without the backend")

    def small_url(self, tmp_path: Path, page_bytes: int, pages: int) -> str:
        """Returns the URL of an empty store that holds about `pages` pages and then is full.

        Where that cannot be had on this machine raise `l3store.testing.plugin.NotHere(reason)`.

        Args:
            tmp_path: A folder of this test's own.
            page_bytes: Bytes of a page, header included.
            pages: It must take at least one such page, and fewer than twice `pages`.
        """
        raise NotImplementedError("give the URL of a small store")

    def unreachable(self, backend: Backend) -> AbstractContextManager[None]:
        """Makes the store of an open backend unreachable for a while (capability `shared`).

        Calls may be running when it begins; what was stored before is there again at the end.
        """
        raise NotImplementedError("take the store away from the open backend, and give it back")

    # -- fixtures --------------------------------------------------------------------------

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        """The URL of this test's store."""
        return self.url(tmp_path)

    @pytest.fixture
    def raw(self, store_url: str) -> Iterator[Backend]:
        """The bare backend."""
        with registry.open(store_url, raw=True) as backend:
            self._capabilities = backend.capabilities
            yield backend

    @pytest.fixture
    def store(self, store_url: str) -> Iterator[Backend]:
        """The backend inside its wrappers, as users have it."""
        with registry.open(store_url) as backend:
            self._capabilities = backend.capabilities
            yield backend

    @pytest.fixture(params=["bare", "wrapped"])
    def either(self, request: pytest.FixtureRequest, store_url: str) -> Iterator[Backend]:
        """The bare backend, and then the same test with its wrappers."""
        with registry.open(store_url, raw=request.param == "bare") as backend:
            self._capabilities = backend.capabilities
            yield backend

    def needs(self, *capabilities: str) -> None:
        """Skips the test unless the backend declares all of these capabilities."""
        for name in capabilities:
            if not getattr(self._capabilities, name):
                raise LacksCapability(f"no capability {name!r}")
