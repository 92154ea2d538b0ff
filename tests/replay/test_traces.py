"""Reading a trace: its facts, and every kind of bad line by number and reason."""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest

from l3store.replay import BadLine, read_trace, synthetic_trace


def _line(ids, **other):
    return json.dumps(
        {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids} | other
    ).encode()


def test_the_real_trace_has_the_facts_it_is_known_by(real_trace):
    requests = blocks = longest = hits = 0
    seen = set()
    with real_trace.open("rb") as lines:
        for request in read_trace(lines):
            ids = request.hash_ids
            requests += 1
            blocks += len(ids)
            longest = max(longest, len(ids))
            hits += next((n for n, block in enumerate(ids) if block not in seen), len(ids))
            seen.update(ids)
            if requests == 1000:
                assert (blocks - hits, hits) == (21_514, 5_791)
            if requests == 2000:
                assert round(hits / blocks, 2) == 0.29
    assert (requests, blocks, len(seen), longest) == (12_031, 288_500, 182_790, 247)
    assert round(hits / blocks, 4) == 0.3664


BAD = [
    (b"{nonsense", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b'{"timestamp": 0, "input_length": 1, "output_length": 1}', "hash_ids"),
    (_line([1], timestamp="soon"), "timestamp"),
    (_line(["1"]), "hash_ids"),
    (_line([1.0]), "hash_ids"),
    (_line([2**63]), "hash_ids"),
    (_line([10**30]), "hash_ids"),
    (_line([1])[:-1] + b', "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply"),
    (_line([1, 2, 1]), "id 1 stands twice"),
    (_line([7, 2]), "id 2 follows id 7, but followed id 1 before"),
    (_line([2]), "id 2 follows the start, but followed id 1 before"),
    (_line([3, 1]), "id 1 follows id 3, but followed the start before"),
    (b"[]", "object"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_line_is_named_with_its_number_and_reason(bad, reason):
    lines = [_line([1, 2]), b"", bad, _line([1, 2, 3])]
    requests = read_trace(lines)
    assert next(requests).hash_ids == [1, 2]
    with pytest.raises(BadLine, match="trace line 3") as caught:
        next(requests)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_line_can_be_left_out_and_leaves_no_trace(bad, reason):
    told = []
    lines = [_line([1, 2]), bad, _line([1, 2, 3]), _line([9, 7]), _line([30, 31])]
    kept = [r.hash_ids for r in read_trace(lines, on_bad=told.append)]
    assert kept == [[1, 2], [1, 2, 3], [9, 7], [30, 31]]
    assert [(bad.line, reason in bad.reason) for bad in told] == [(2, True)]


def test_the_trace_is_read_as_it_goes():
    def lines():
        yield _line([1])
        raise AssertionError("the second line was read too early")

    assert next(read_trace(lines())).hash_ids == [1]


def test_a_synthetic_trace_is_the_same_everywhere():
    first = [(r.timestamp, r.input_length, r.output_length, r.hash_ids[-1])
             for r in synthetic_trace(1, 4)]  # fmt: skip
    assert first == [
        (0, 6526, 161, 12),
        (0, 30194, 104, 70),
        (0, 4751, 563, 79),
        (0, 6891, 104, 92),
    ]
    whole = json.dumps([r.hash_ids for r in synthetic_trace(1, 2000)]).encode()
    assert (
        hashlib.sha256(whole).hexdigest()
        == "583fab91ca0e3af7973c9cbe4c5137b76852a47659173805da77ad3eb4e72c83"
    )


def test_a_synthetic_trace_is_a_valid_one_of_the_real_shape():
    lines = [
        json.dumps({"timestamp": r.timestamp, "input_length": r.input_length,
                    "output_length": r.output_length, "hash_ids": r.hash_ids}).encode()
        for r in synthetic_trace(1, 12_000)
    ]  # fmt: skip
    hits, blocks, seen = [0], [0], set()
    for request in read_trace(lines):
        ids = request.hash_ids
        hit = next((n for n, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
        hits.append(hits[-1] + hit)
        blocks.append(blocks[-1] + len(ids))
        assert 512 * (len(ids) - 1) < request.input_length <= 512 * len(ids)
    assert max(b - a for a, b in itertools.pairwise(blocks)) == 247
    assert 0.18 < hits[1000] / blocks[1000] < 0.25
    assert 0.35 < hits[-1] / blocks[-1] < 0.39
    assert 22 < blocks[-1] / 12_000 < 26


def test_another_seed_is_another_trace():
    one, two = ([r.hash_ids for r in synthetic_trace(seed, 50)] for seed in (1, 2))
    assert one != two
