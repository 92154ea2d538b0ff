"""One stub for all tests: each has a prefix of its own, and finds no fault of the one before."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from l3store import registry
from tests.backends.s3._stub import Stub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from l3store.abc import Backend

_numbers = itertools.count()


@pytest.fixture(scope="session")
def _stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with Stub(tmp_path_factory.mktemp("stub")) as stub:
        yield stub


@pytest.fixture
def stub(_stub: Stub) -> Iterator[Stub]:
    _stub.asked()
    yield _stub
    _stub.faults()


@pytest.fixture
def opened(stub: Stub) -> Iterator[Callable[..., Backend]]:
    """Opens stores, of the test's own prefix unless told otherwise, and closes them."""
    stores: list[Backend] = []
    own = f"test-{next(_numbers)}"

    def open_one(prefix: str = own, *, raw: bool = True, **options: Any) -> Backend:
        stores.append(registry.open(stub.url(prefix, **options), raw=raw))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture(params=["obstore", "boto3"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)
