"""Promise 9: a name is taken by the grammar or refused, and names one thing only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from l3store import keys, page
from l3store.testing.kit import PLACE, Pages, promise
from l3store.testing.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.abc import Backend

__all__ = ["HostileSuite"]


class HostileSuite(Suite):
    """Tests of names that lead elsewhere, and of names that are near each other."""

    @promise(9, 12)
    @pytest.mark.parametrize(
        "key",
        [
            "", "/", "a/b/c", f"{PLACE}/", f"{PLACE}/{'0' * 63}", f"{PLACE}/{'0' * 65}",
            f"{PLACE}/{'A' * 64}", f"{PLACE}/{'g' * 64}", f"{PLACE}/{'0' * 64}\n",
            f"{PLACE}/{' ' * 2}{'0' * 62}", f"../kv/all/{'0' * 64}", f"./kv/all/{'0' * 64}",
            f"a/../all/{'0' * 64}", f"a/kv/../{'0' * 64}", f"/a/kv/all/{'0' * 64}",
            f"a//kv/all/{'0' * 64}", f"a/kv/all/x/{'0' * 64}", f"a\0b/kv/all/{'0' * 64}",
            f"a/kv/all/{chr(0x660) * 64}", f"A/kv/all/{'0' * 64}", f"a/k-v/all/{'0' * 64}",
            f"{'a' * 97}/kv/all/{'0' * 64}", f"a/kv/{'s' * 65}/{'0' * 64}",
        ],
    )  # fmt: skip
    def test_a_name_outside_the_grammar_is_refused_everywhere(
        self, either: Backend, key: str
    ) -> None:
        """`ValueError`, and a good key beside it is not stored either."""
        pages = Pages(count=2)
        mixed = [pages.keys[0], key]
        room = pages.room()
        calls: list[Callable[[], object]] = [
            lambda: either.batch_exists(mixed),
            lambda: either.exists_each(mixed),
            lambda: either.page_get(mixed, room.pages),
            lambda: either.page_set(mixed, pages.sealed()),
        ]
        if either.capabilities.delete:
            calls.append(lambda: either.delete(mixed))
        if either.capabilities.headers:
            calls.append(lambda: either.headers(mixed))
        for call in calls:
            with pytest.raises(ValueError, match=r".+"):
                call()
        assert either.batch_exists(pages.keys) == 0, "half of a refused batch was stored"
        assert room.untouched()

    @promise(9)
    @pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a/b/c/d", "A", "a\0", "a/kv/.."])
    def test_a_bad_descriptor_name_is_refused(self, either: Backend, name: str) -> None:
        """A meta name is a namespace or a place."""
        with pytest.raises(ValueError, match=r".+"):
            either.put_meta(name, b"x")
        with pytest.raises(ValueError, match=r".+"):
            either.get_meta(name)

    @promise(9)
    def test_a_key_names_one_thing_only(self, either: Backend) -> None:
        """Two namespaces, pools or shards with one page hash are two pages."""
        places = [
            "a/kv/all", "b/kv/all", "a/indexer/all", "a/kv/T0of2", "a/kv/T1of2", "a/kv/t1of2",
            "a-b/kv/c", "a/b/kv-c", "a.b/kv/c", "a/b/kv.c", "a_b/kv/c", "a/b_kv/c",
        ]  # fmt: skip
        stored = {place: Pages(count=2, place=place, size=64 + i) for i, place in enumerate(places)}
        for pages in stored.values():
            assert either.batch_exists(pages.keys) == 0
            either.page_set(pages.keys, pages.sealed())
        for pages in stored.values():
            room = pages.room()
            assert either.page_get(pages.keys, room.pages) == [True, True]
            assert page.parse(room.pages[0][0]).place_digest == page.place_digest(pages.place)
        if either.capabilities.delete:
            either.delete(stored["a/kv/all"].keys)
            assert [either.batch_exists(p.keys) for p in stored.values()] == [0] + [2] * 11
        keys.check_keys([key for pages in stored.values() for key in pages.keys])

    @promise(9)
    def test_every_digit_of_a_page_hash_counts(self, either: Backend) -> None:
        """64 keys, each in one digit another than that of a stored page: all absent."""
        pages = Pages(count=1, size=64)
        key = pages.keys[0]
        start = len(key) - 64
        near = [
            f"{key[:at]}{(int(key[at], 16) + 1) % 16:x}{key[at + 1 :]}"
            for at in range(start, len(key))
        ]
        assert either.page_set(pages.keys, pages.sealed()) == [True]
        assert either.exists_each(near) == [False] * 64
        assert either.page_get(near, Pages(count=64, size=64).room().pages) == [False] * 64
        assert either.batch_exists([key, *near]) == 1
