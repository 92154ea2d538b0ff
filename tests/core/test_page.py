"""The page header: its bytes for ever, and every way in which a page can be wrong."""

from __future__ import annotations

import random

import pytest
from xxhash import xxh3_64_intdigest

from l3store import page
from l3store.errors import IntegrityError
from l3store.keys import FIRST_PAGE, Chain

PLACE = "m-1/kv/T0of2"
HASHES = (bytes(range(32)), bytes(range(32, 64)))


def _sealed(chain=None, payload=b"payload", place=PLACE, clock=lambda: 1_700_000_000_000_000_001):
    chain = chain or Chain(HASHES[:1], FIRST_PAGE, 0)
    return page.seal(place, chain, [(memoryview(bytearray(payload)),)] * len(chain), clock=clock)


def _key(value=HASHES[0], place=PLACE):
    return f"{place}/{value.hex()}"


def _resummed(header):
    """The header with a checksum of its own that holds, as a wrong writer would make it."""
    return bytes(header[:120]) + xxh3_64_intdigest(bytes(header[:120])).to_bytes(8, "little")


def test_golden_header_of_a_first_page():
    """Literal bytes: a page stored by this version stays readable for ever."""
    assert bytes(_sealed()[0][0]).hex() == (
        "4c335047010000000700000000000000a5c250f37e9ed519d39c1c78fe67952e"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "0000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000001002a36fe9c97177b8d2d5bf061fe3246938e0195905db4"
    )


def test_golden_header_of_a_page_with_unknown_parent_and_depth():
    assert bytes(_sealed(Chain(HASHES[:1], None, None))[0][0]).hex() == (
        "4c335047010003000700000000000000a5c250f37e9ed519d39c1c78fe67952e"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "0000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000001002a36fe9c97177b8d2d5bf061fe32cc6d3915dc47ada6"
    )


def test_headers_carry_parent_and_depth_along_the_chain():
    first, second = _sealed(Chain(HASHES, FIRST_PAGE, 0))
    assert (page.parse(first[0]).parent, page.parse(first[0]).depth) == (FIRST_PAGE, 0)
    assert (page.parse(second[0]).parent, page.parse(second[0]).depth) == (HASHES[0], 1)


def test_an_unknown_parent_and_depth_are_told_from_none():
    first, second = _sealed(Chain(HASHES, None, None))
    assert (page.parse(first[0]).parent, page.parse(first[0]).depth) == (None, None)
    assert (page.parse(second[0]).parent, page.parse(second[0]).depth) == (HASHES[0], None)


def test_a_sealed_page_opens():
    check = page.opener([_key()])
    assert check(0, _sealed()[0])
    assert not check.reasons


@pytest.mark.parametrize("cuts", [(1,), (6,), (1, 2, 3, 4, 5, 6), (0, 7), (3, 3)])
def test_cutting_the_payload_differently_changes_nothing(cuts):
    sealed = _sealed()[0]
    pieces, start = [], 0
    for end in (*cuts, 7):
        pieces.append(sealed[1][start:end])
        start = end
    assert page.opener([_key()])(0, (sealed[0], *pieces))


def test_every_flipped_bit_is_found():
    sealed = _sealed(payload=bytes(64))[0]
    whole = bytearray(b"".join(sealed))
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        view = memoryview(whole)
        assert not page.opener([_key()])(0, (view[:128], view[128:])), f"bit {bit} passed"
        whole[bit // 8] ^= 1 << bit % 8


def _changed(at, value):
    header = bytearray(_sealed()[0][0])
    header[at : at + len(value)] = value
    return _resummed(header)


@pytest.mark.parametrize(
    ("reason", "header", "key"),
    [
        ("magic", bytes(128), _key()),
        ("magic", _changed(0, b"L3PX"), _key()),
        ("version", _changed(4, b"\x02\x00"), _key()),
        ("flags", _changed(4, b"\x00\x00"), _key()),
        ("flags", _changed(6, b"\x04\x00"), _key()),
        ("header", bytes(_sealed()[0][0])[:-1] + b"\0", _key()),
        ("place", bytes(_sealed(place="m-1/kv/T1of2")[0][0]), _key()),
        ("place", bytes(_sealed(place="m-2/kv/T0of2")[0][0]), _key()),
        ("hash", bytes(_sealed()[0][0]), _key(HASHES[1])),
        ("length", _changed(8, (6).to_bytes(8, "little")), _key()),
        ("length", _changed(8, (8).to_bytes(8, "little")), _key()),
        ("length", _changed(8, (2**64 - 1).to_bytes(8, "little")), _key()),
        ("payload", bytes(_sealed(payload=b"another")[0][0]), _key()),
    ],
)
def test_a_wrong_page_is_refused_with_its_reason(reason, header, key):
    segments = (memoryview(bytearray(header)), memoryview(bytearray(b"payload")))
    check = page.opener([key])
    assert not check(0, segments)
    assert dict(check.reasons) == {reason: 1}
    assert page.refusal(key, segments) == reason
    assert reason in page.REASONS


@pytest.mark.parametrize("length", [0, 1, 119, 127])
def test_a_truncated_header_is_refused_without_reading_past_it(length):
    with pytest.raises(IntegrityError) as caught:
        page.parse(bytes(_sealed()[0][0])[:length])
    assert caught.value.reason == "truncated"


def test_a_newer_version_is_named_with_both_versions():
    with pytest.raises(IntegrityError, match=r"version 7; .* up to 1"):
        page.parse(_changed(4, b"\x07\x00"))


def test_random_bytes_never_parse():
    rng = random.Random(1)
    for _ in range(2000):
        with pytest.raises(IntegrityError):
            page.parse(b"L3PG\x01\x00" + rng.randbytes(122))


def test_the_header_of_the_caller_must_be_whole():
    with pytest.raises(ValueError, match="128"):
        page.opener([_key()])(0, (memoryview(bytearray(64)), memoryview(bytearray(7))))


def test_sealing_refuses_what_is_no_page():
    with pytest.raises(ValueError, match="1 pages in the chain, but 2"):
        page.seal(PLACE, Chain(HASHES[:1]), [(memoryview(b"x"),)] * 2)
    with pytest.raises(ValueError, match="no payload"):
        page.seal(PLACE, Chain(HASHES[:1]), [(memoryview(b""),)])


def test_framing_keeps_the_callers_memory():
    payload = bytearray(8)
    segments = page.frame([(memoryview(payload)[:4], memoryview(payload)[4:])])[0]
    segments[2][0] = 7
    assert [len(piece) for piece in segments] == [128, 4, 4]
    assert payload[4] == 7


@pytest.mark.parametrize("length", [None, 12])
def test_pages_told_by_columns_are_those_told_one_by_one(length):
    rows = [tuple(memoryview(bytes([page, piece] * 2)) for piece in range(3)) for page in range(2)]
    chain = Chain(HASHES, FIRST_PAGE, 0)
    stamped = page.frame_columns(list(zip(*rows, strict=True)), 2)
    page.stamp(PLACE, chain, stamped, length=length, clock=lambda: 1)
    sealed = page.seal(PLACE, chain, rows, clock=lambda: 1)
    assert [[bytes(piece) for piece in one] for one in stamped] == [
        [bytes(piece) for piece in one] for one in sealed
    ]
    assert all(stamped[i][k + 1] is rows[i][k] for i in range(2) for k in range(3))


def test_columns_of_unequal_length_are_no_pages():
    with pytest.raises(ValueError, match="shorter"):
        page.frame_columns([[memoryview(b"x")] * 2, [memoryview(b"y")]], 2)


def _segments(payload):
    return (memoryview(bytearray(128)), memoryview(bytearray(payload)))


@pytest.mark.parametrize(
    ("keys", "pages", "match"),
    [
        ([_key()], [], "1 keys, but 0 pages"),
        ([_key()[:-1]], [_segments(4)], "page hash"),
        ([_key(), _key(HASHES[1])], [_segments(4), _segments(5)], "one length"),
        ([_key()], [(memoryview(bytearray(4)),)], "segment 0"),
        ([_key()], [()], "segment 0"),
    ],
)
def test_a_batch_is_refused_before_anything_is_done(keys, pages, match):
    with pytest.raises(ValueError, match=match):
        page.check_batch(keys, pages)


def test_two_places_may_have_two_lengths():
    other = _key(place="m-1/indexer/all")
    assert page.check_batch([_key(), other], [_segments(4), _segments(5)]) == {
        PLACE: 4, "m-1/indexer/all": 5,
    }  # fmt: skip
