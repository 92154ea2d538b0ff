"""Facts and records as bytes: all comes back, and whatever does not fit exactly is a ValueError."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from l3store.consensus.values import ALL_ENDS, Acks, Bounds, Facts, Kind, Record, Row
from l3store.consensus.wire import (
    VERSION,
    Rows,
    decode_facts,
    decode_record,
    encode_facts,
    encode_record,
)

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
OPS = st.frozensets(U64, max_size=4)
PER_KIND = len(Kind)


def per_kind(one):
    return st.tuples(*[one] * PER_KIND)


ROWS = st.builds(Row, U64, U64, U32, U32, U32, st.booleans(), st.booleans())
SETS = st.dictionaries(U64, st.integers(0, 1 << 70), max_size=3)
FACTS = st.builds(
    Facts, U64, U32, U64, U64, st.lists(U32, max_size=9).map(tuple),
    st.frozensets(ROWS, max_size=4), SETS, per_kind(st.tuples(U64, OPS)), per_kind(OPS), U64, U64,
)  # fmt: skip
BOUNDS = st.builds(
    Bounds, U32, U32, U32, U32, U32, st.booleans(), st.just(ALL_ENDS) | st.integers(0, 1 << 70)
)
ACKS = st.lists(U64, max_size=4, unique=True).flatmap(
    lambda ended: st.builds(
        Acks, st.just(tuple(ended)), st.frozensets(st.sampled_from(ended)) if ended else st.just(())
    ).map(lambda acks: Acks(acks.ended, frozenset(acks.failed)))
)
RECORDS = st.builds(
    Record, U64, st.floats(allow_nan=False, allow_infinity=False), U64, st.booleans(),
    st.dictionaries(U64, BOUNDS, max_size=4), per_kind(ACKS),
)  # fmt: skip

A_FACTS = Facts(
    7, 1, 5, 3, (11, 12), frozenset({Row(2, 99, 8, 5, 1, True, False)}), {2: 0b101000},
    ((1, frozenset()), (0, frozenset()), (4, frozenset({6, 9}))),
    (frozenset(), frozenset(), frozenset({6})), 1, 2,
)  # fmt: skip
A_RECORD = Record(
    4, 12.5, 1, True, {2: Bounds(8, 8, 5, 6, 1, False, 0b1000), 3: Bounds()},
    (Acks((1, 2), frozenset({2})), Acks(), Acks((9,))),
)  # fmt: skip
BOTH = [
    pytest.param(A_FACTS, encode_facts, decode_facts, id="facts"),
    pytest.param(A_RECORD, encode_record, decode_record, id="record"),
]


@settings(max_examples=50)
@given(FACTS)
def test_all_facts_come_back(facts):
    assert decode_facts(encode_facts(facts)) == facts


@settings(max_examples=50)
@given(RECORDS)
def test_all_of_a_record_comes_back(record):
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(("value", "encode", "decode"), BOTH)
def test_a_text_that_is_cut_anywhere_is_refused(value, encode, decode):
    text = encode(value)
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"bytes"):
            decode(text[:length])
        with pytest.raises(ValueError, match=r"bytes"):
            decode(text[:8] + length.to_bytes(4, "little") + text[12:length])  # it says so, too


@pytest.mark.parametrize(("value", "encode", "decode"), BOTH)
def test_a_text_with_bytes_behind_its_end_is_refused(value, encode, decode):
    text = encode(value) + b"\0"
    with pytest.raises(ValueError, match="are no text"):
        decode(text)
    with pytest.raises(ValueError, match="1 bytes behind the end"):
        decode(text[:8] + len(text).to_bytes(4, "little") + text[12:])


@pytest.mark.parametrize(("value", "encode", "decode"), BOTH)
def test_a_bit_that_flips_is_refused_or_gives_another_value_never_another_error(
    value, encode, decode
):
    text = encode(value)
    refused = 0
    for at in range(len(text) * 8):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        try:
            found = decode(bytes(flipped))
        except ValueError:
            refused += 1
        else:
            assert decode(encode(found)) == found
    assert refused > 12 * 8 - 9  # the head alone, but for its one empty byte


@given(st.binary(max_size=300))
def test_bytes_of_anybody_are_refused(data):
    for decode in (decode_facts, decode_record):
        with pytest.raises(ValueError, match="bytes"):
            decode(data)


@given(st.binary(max_size=200))
def test_anything_behind_a_right_head_is_refused_or_a_value(data):
    length = (12 + len(data)).to_bytes(4, "little")
    for kind, encode, decode in zip(
        (1, 2), (encode_facts, encode_record), (decode_facts, decode_record), strict=True
    ):
        text = b"L3CS" + bytes([VERSION, 0, kind, 0]) + length + data
        try:
            found = decode(text)
        except ValueError:
            continue
        assert decode(encode(found)) == found


@pytest.mark.parametrize(("at", "size"), [(56, 2), (58, 4), (62, 4)])
def test_a_count_of_billions_costs_nothing(at, size):
    """Digests, rows and sets of ends are told before they come: none is believed."""
    text = bytearray(encode_facts(A_FACTS))
    text[at : at + size] = b"\xff" * size
    with pytest.raises(ValueError, match="ends too early"):
        decode_facts(bytes(text))


def test_facts_are_no_record_and_no_other_version():
    text = encode_facts(A_FACTS)
    with pytest.raises(ValueError, match="are no text of kind 2"):
        decode_record(text)
    with pytest.raises(ValueError, match=f"version {VERSION + 1}; this is version {VERSION}"):
        decode_facts(text[:4] + bytes([VERSION + 1, 0]) + text[6:])


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_record_whose_clock_is_no_number_is_refused(make, now):
    with pytest.raises(ValueError, match=f"at {now} s"):
        decode_record(encode_record(make.replace(A_RECORD, now=now)))


def test_a_record_that_names_a_ticket_twice_is_refused():
    text = encode_record(A_RECORD)
    first, second = 12 + 33, 12 + 33 + 29  # head, fixed part; a row has 29 bytes
    twice = text[:first] + text[second : second + 29] + text[second:]
    with pytest.raises(ValueError, match="2 rows of 1 tickets"):
        decode_record(twice)


def test_an_operation_that_failed_has_ended(make):
    acks = (Acks((1,), frozenset({2})), Acks(), Acks())
    with pytest.raises(ValueError, match="failed and have not ended"):
        decode_record(encode_record(make.replace(A_RECORD, acks=acks)))


def test_operations_of_a_record_have_no_floor():
    text = bytearray(encode_record(A_RECORD))
    text[-24] = 1  # the last kind: floor, two counts, one operation
    with pytest.raises(ValueError, match="record 4: "):
        decode_record(bytes(text))


def test_end_points_have_a_row():
    text = encode_record(A_RECORD)
    at = text.index(b"\x02" + bytes(7) + b"\x01\0\0\0\x08")
    with pytest.raises(ValueError, match="ticket 5 without its row"):
        decode_record(text[:at] + b"\x05" + text[at + 1 :])


def test_the_layout_is_the_same_in_every_version_of_the_library():
    """Or the version goes up: ranks of one group may run two of them. A literal, never computed."""
    texts = encode_facts(A_FACTS), encode_record(A_RECORD)
    assert [blake2b(text, digest_size=8).hexdigest() for text in texts] == [
        "ce9257267b4476c6", "ea70547db5b133bc",
    ]  # fmt: skip


@settings(max_examples=40, phases=[Phase.generate])  # to shrink these takes minutes
@given(st.lists(st.tuples(FACTS, st.integers(0, 40)), min_size=2, max_size=6))
def test_rows_that_are_kept_from_the_last_report_change_nothing(said):
    """Also when a report between was cut; rows move from one report into the next."""
    kept, before = Rows(), frozenset()
    for facts, cut in said:
        shared = replace(facts, rows=facts.rows | frozenset(list(before)[::2]))
        before = shared.rows
        text = encode_facts(shared)
        if cut > 30:
            with pytest.raises(ValueError, match="bytes"):
                decode_facts(text[:-1], kept)
        for _ in range(2):
            assert decode_facts(text, kept) == shared


def test_a_text_may_be_a_view():
    assert decode_facts(memoryview(encode_facts(A_FACTS))) == A_FACTS
