"""Each layout through sglang's own controller: L1 to L3, everything forgotten, L3 to L1.

Bytes are random, L1 and L2 hold others once they are forgotten, and every byte of every layer is
compared. Each geometry meets each way of moving pages and each store in what `make test` runs;
`make soak` runs all of their combinations.
"""

from __future__ import annotations

from itertools import product

import pytest
from hicache_rank import Geometry, differing, l3store, tokens
from stored import delete, nvme

GEOMETRIES = {
    "MHA layer_first": Geometry(layout="layer_first"),
    "MHA layer_first direct": Geometry(layout="layer_first", direct=True),
    "MHA page_first": Geometry(layout="page_first"),
    "MHA page_first_direct": Geometry(layout="page_first_direct"),
    "MHA page_head": Geometry(layout="page_head"),
    "MLA layer_first": Geometry(mla=True, layout="layer_first"),
    "MLA layer_first direct": Geometry(mla=True, layout="layer_first", direct=True),
    "MLA page_first": Geometry(mla=True, layout="page_first"),
    "MLA page_first_direct": Geometry(mla=True, layout="page_first_direct"),
}
WAYS = ["v1", "generic"]
STORES = ["memory", "nvme"]
ALL = list(product(GEOMETRIES, WAYS, STORES))
COVERING = [
    (geometry, way, store)
    for geometry, way, store in ALL
    if (list(GEOMETRIES).index(geometry) + WAYS.index(way) + STORES.index(store)) % 2 == 0
]
CASES = [
    pytest.param(*case, marks=() if case in COVERING else pytest.mark.soak, id="-".join(case))
    for case in ALL
]


@pytest.fixture
def nvme_url(tmp_path):
    return nvme(tmp_path / "store")


def test_what_make_test_leaves_out_is_no_pair():
    """Of geometry and way, geometry and store, way and store."""
    for pair in ((0, 1), (0, 2), (1, 2)):
        seen = {tuple(case[i] for i in pair) for case in COVERING}
        assert seen == {tuple(case[i] for i in pair) for case in ALL}


@pytest.mark.parametrize(("geometry", "way", "store"), CASES)
def test_a_prompt_comes_back_from_the_store_byte_for_byte(new_rank, nvme_url, geometry, way, store):
    url = {"memory": "memory://?capacity=16MiB", "nvme": nvme_url}[store]
    rank = new_rank(l3store(url, v1=way == "v1"), geometry=GEOMETRIES[geometry])
    prompt = tokens(20)
    written = rank.insert(prompt)
    rank.backup()
    rank.wipe()
    assert rank.prefetch(prompt) == len(prompt)
    assert differing(rank.load_back(prompt), written) == []


def test_the_harness_sees_what_comes_back_wrong(new_rank, tmp_path, monkeypatch):
    """With sglang's own file backend, which checks nothing: one bit of one page."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    rank = new_rank(None)
    prompt = tokens(20)
    written = rank.insert(prompt)
    rank.backup()
    rank.wipe()
    assert rank.prefetch(prompt) == len(prompt)
    assert differing(rank.load_back(prompt), written) == []
    page = min(tmp_path.iterdir())
    page.write_bytes(page.read_bytes()[:-1] + bytes([page.read_bytes()[-1] ^ 1]))
    rank.wipe()
    assert rank.prefetch(prompt) == len(prompt)
    assert differing(rank.load_back(prompt), written) == ["layer 3 V"]


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_of_several_batches_comes_back(new_rank, nvme_url, way):
    """sglang reads and writes 128 pages at once, and asks for as many."""
    rank = new_rank(l3store(nvme_url, v1=way == "v1"), pages=320)
    prompt = tokens(300)
    written = rank.insert(prompt)
    rank.backup()
    rank.wipe()
    assert rank.prefetch(prompt) == len(prompt)
    assert differing(rank.load_back(prompt), written) == []


def test_what_l2_still_holds_is_not_read_again(new_rank, nvme_url):
    """A prefetch begins where L1 and L2 end: in the middle of a chain."""
    rank = new_rank(l3store(nvme_url))
    prompt = tokens(20)
    written = rank.insert(prompt)
    rank.backup()
    rank.wipe()
    assert rank.prefetch(prompt[: 7 * 16]) == 7 * 16
    assert rank.prefetch(prompt, "later") == 13 * 16
    assert differing(rank.load_back(prompt), written) == []


@pytest.mark.parametrize("lost", [0, 1, 11, 19])
def test_a_prefix_ends_at_the_first_page_that_is_gone(new_rank, nvme_url, lost):
    rank = new_rank(l3store(nvme_url))
    prompt = tokens(20)
    written = rank.insert(prompt)
    rank.backup()
    rank.wipe()
    free = rank.host_free
    delete(nvme_url, depth=lost)
    assert rank.prefetch(prompt) == lost * 16
    back = rank.load_back(prompt)
    assert differing(back, {name: rows[: lost * 16] for name, rows in written.items()}) == []
    rank.pump(lambda: rank.host_free == free - lost * 16)
