"""Requests are those that redis-py would send, and names lead back to their keys."""

from __future__ import annotations

import fnmatch

import pytest
from redis.connection import Connection

from l3store.backends.redis.names import Names
from l3store.backends.redis.requests import each, listing, request
from l3store.testing.kit import PLACE, Pages


def packed(*words):
    return b"".join(Connection().pack_command(*words))


@pytest.mark.parametrize(
    "words",
    [
        ("PING",), ("GET", b"a name"), ("SET", b"n", b"\r\n$-1\r\n", "PX", 12), ("SET", b"n", b""),
        ("HSET", "ü", "schön", b"\0\xff"),
    ],
)  # fmt: skip
def test_a_request_is_as_redis_py_packs_it(words):
    assert request(*words) == packed(*words)


@pytest.mark.parametrize("names", [[b"one"], [b"one", b"two"], [b"a", b"bb", b"ccc"], []])
@pytest.mark.parametrize("behind", [(), (b"0", b"127")])
def test_many_requests_are_as_redis_py_packs_them(names, behind):
    found = each((b"GETRANGE",), names, behind)
    assert found == [packed("GETRANGE", name, *behind) for name in names]


@pytest.mark.parametrize("names", [[b"one"], [b"one", b"two"], [b"a", b"bb", b"ccc"]])
def test_a_request_of_many_names_is_as_redis_py_packs_it(names):
    assert listing(b"EXISTS", names) == packed("EXISTS", *names)


def test_a_name_leads_back_to_its_key_and_nothing_else_does():
    names, keys = Names("a[b]*?:"), Pages(count=3).keys
    assert [names.key(name) for name in names.pages(keys)] == keys
    assert names.pages([]) == []
    for other in (
        names.marker, names.meta, names.lengths, names.health + b"x", keys[0].encode(),
        names.pages(keys)[0] + b"x", b"a[b]*?:\xff", b"ab:" + keys[0].encode(), b"",
    ):  # fmt: skip
        assert names.key(other) is None


@pytest.mark.parametrize("prefix", ["l3:", "a*", "a?[x]", "back\\slash", "^", "Ü:"])
def test_a_pattern_matches_its_own_names_alone(prefix):
    """By a matcher that knows no backslash: what it escapes is put into brackets."""
    pattern = Names(prefix).pattern(PLACE).decode()
    plain, at = "", 0
    while at < len(pattern) - 1:
        at += pattern[at] == "\\"
        plain += f"[{pattern[at]}]" if pattern[at] in "*?[" else pattern[at]
        at += 1
    assert fnmatch.fnmatchcase(f"{prefix}{PLACE}/x", f"{plain}*")
    assert not fnmatch.fnmatchcase(f"{prefix}x{PLACE}/x", f"{plain}*")
    assert plain.replace("[*]", "*").replace("[?]", "?").replace("[[]", "[") == f"{prefix}{PLACE}/"
