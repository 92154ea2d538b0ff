"""Opening by URL: the whole stack, or the bare backend, or an error that helps."""

from __future__ import annotations

import pytest

from l3store import registry
from l3store.backends.memory import MemoryBackend
from l3store.errors import ConfigError
from l3store.wrap import Breaker, Deadline, Metered, Verify


def test_a_store_is_opened_inside_its_wrappers():
    with registry.open("memory://") as store:
        layers, at = [], store
        while hasattr(at, "inner"):
            layers.append(type(at))
            at = at.inner
        assert layers == [Metered, Breaker, Deadline, Verify]
        assert isinstance(at, MemoryBackend)


def test_raw_gives_the_bare_backend():
    with registry.open("memory://?deadline=1s", raw=True) as store:
        assert type(store) is MemoryBackend


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("memry://", "'memry'; did you mean 'memory'"),
        ("memory://?capacty=1GiB", "'capacty'.*did you mean 'capacity'"),
        ("memory://?deadlin=1s", "did you mean 'deadline'"),
        ("memory://?late=weit", "did you mean 'wait'"),
        ("memory://?capacity=128", "hold no page"),
        ("memory://here/", "use memory://"),
        ("file://mnt/l3", "file:///mnt/l3"),
    ],
)
def test_a_wrong_url_names_the_nearest_right_one(url, match):
    with pytest.raises(ConfigError, match=match):
        registry.open(url)


def test_schemes_are_listed():
    assert {"memory", "file"} <= set(registry.schemes())
