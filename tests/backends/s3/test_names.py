"""Names of objects lead back to what they name, and never to two things."""

from __future__ import annotations

import pytest

from l3store.backends.s3.names import Names
from l3store.testing.kit import Pages

KEYS = [key for place in ("a/kv/all", "meta/kv/T0of2", "ab/l3/B.c+d-1")
        for key in Pages(count=3, place=place).keys]  # fmt: skip


@pytest.mark.parametrize("fanout", [0, 1, 2, 4])
def test_a_page_has_one_name_and_it_leads_back(fanout):
    names = Names("some/prefix", fanout)
    for key in KEYS:
        name = names.page(key)
        assert names.key(name) == key
        place = key.rpartition("/")[0]
        assert sum(name.startswith(start) for start in names.fans()) == 1
        assert sum(name.startswith(start) for start in names.fans(place)) == 1
    assert len(names.fans()) == 16**fanout
    assert len({names.page(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("fanout", [0, 2])
def test_what_is_no_page_is_none(fanout):
    names, other = Names("p", fanout), Names("p", 2 - fanout)
    key = KEYS[0]
    name = names.page(key)
    for foreign in (
        other.page(key), name + "x", name[:-1], name.upper(), f"q{name[1:]}", f"p/{name}",
        "p/", "p", "", names.marker, names.health, names.meta("a"), names.meta("a/kv/all"),
        names.length("a/kv/all"), f"p/zz/{key}", f"p/00/{key[:-2]}{'01' if fanout else ' '}",
    ):  # fmt: skip
        assert names.key(foreign) is None, foreign


def test_the_stores_own_objects_are_never_pages_or_folders_of_each_other():
    names = Names("p", 0)
    own = [names.marker, names.health, names.meta("a"), names.meta("a/kv/all"),
           names.length("a/kv/all"), *map(names.page, KEYS)]  # fmt: skip
    assert len(set(own)) == len(own)
    assert not [(one, other) for one in own for other in own if other.startswith(f"{one}/")]


@pytest.mark.parametrize("name", ["a", "a.b_c-d", "a/kv/all", "a/kv/T0of2.x+y"])
def test_a_descriptors_name_leads_back(name):
    names = Names("p", 2)
    assert names.meta_of(names.meta(name)) == name


@pytest.mark.parametrize(
    "name", ["p/_l3/meta/", "p/_l3/meta/A", "p/_l3/meta/a,b", "p/_l3/meta/a/b"]
)
def test_a_foreign_descriptor_is_nobodys(name):
    assert Names("p", 2).meta_of(name) is None
