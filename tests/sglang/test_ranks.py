"""Two ranks, two processes: what one of them lacks, both do without, and neither waits for ever.

The ranks agree by sglang's own means, the smaller of both hits and of both progresses; sglang's own
checker ends a rank that takes for agreed what the other does not. One rank's store meets a trouble
and the other's is well; both must end with the same prefix, the right bytes, and no page of L2
less. `make test` puts each trouble on one rank of each topology, `make soak` on the other as well.
"""

from __future__ import annotations

import shutil
from itertools import count

import pytest
from hicache_rank import l3store
from stored import SMALL, delete, headers, nvme
from two_ranks import TOPOLOGIES, Pair

from l3store import registry
from l3store.wrap import Faulty

PAGES, TOKENS = 20, 16


@pytest.fixture(scope="session")
def pairs():
    """The pair of all tests, made anew when a test has lost it."""
    made = []

    def get():
        if not made or not made[-1].alive:
            made.append(Pair())
        return made[-1]

    yield get
    for pair in made:
        pair.kill()


@pytest.fixture
def pair(pairs):
    return pairs()


class Stores:
    """The store that both ranks wrote, and the same store behind a trouble."""

    def __init__(self, folder, shard):
        self.path, self.shard = folder / "store", shard
        self.url = nvme(self.path)

    def troubled(self, faults):
        return f"troubled://{self.path}?of=nvme&{SMALL}&{faults}"

    def pages_until(self, kind):
        """Returns faults that the rank's pages meet, and how many come before the first."""
        keys = {header.depth: key for key, header in headers(self.url).items() if self.is_of(key)}
        with registry.open(self.url) as store:
            for seed in count():
                faulty = Faulty(store, seed=seed, **{kind: 0.1})
                met = [faulty.meets(kind, keys[depth]) for depth in range(PAGES)]
                if True in met[3:-3] and True not in met[:3]:
                    return self.troubled(f"{kind}=0.1&seed={seed}"), met.index(True)

    def is_of(self, key):
        return key.split("/")[2] == self.shard


LATE = "deadline=200ms&late=staged"
TROUBLES = {
    "none": lambda stores: (stores.url, PAGES),
    "slow": lambda stores: (stores.troubled("delay=1&delay_seconds=0.2"), PAGES),
    "reads miss": lambda stores: stores.pages_until("miss"),
    "reads are damaged": lambda stores: stores.pages_until("flip"),
    "reads fail midway": lambda stores: stores.pages_until("partial"),
    "every call fails": lambda stores: (stores.troubled("error=1"), 0),
    "reads fail": lambda stores: (stores.troubled("error=1&at=page_get"), 0),
    "queries raise": lambda stores: (stores.troubled("bug=1&at=batch_exists"), 0),
    "reads raise": lambda stores: (stores.troubled("bug=1&at=page_get"), 0),
    "queries hang": lambda stores: (stores.troubled(f"hang=1&at=batch_exists&{LATE}"), 0),
    "reads hang": lambda stores: (stores.troubled(f"hang=1&at=page_get&{LATE}"), 0),
}
ALL = [
    (topology, trouble, rank, (i + k) % 2 == rank)
    for i, topology in enumerate(TOPOLOGIES)
    for k, trouble in enumerate(TROUBLES)
    for rank in range(2)
]
CASES = [
    pytest.param(*case, marks=() if smoke else pytest.mark.soak, id="{}-{}-rank {}".format(*case))
    for *case, smoke in ALL
]


def start(pair, model, topology, urls):
    pair.do("start", model, TOPOLOGIES[topology], each=[(l3store(url),) for url in urls])


def write(pair, model, topology, url):
    start(pair, model, topology, [url, url])
    pair.do("write", TOPOLOGIES[topology].mla)


def check(recalls, pages):
    length = pages * TOKENS
    assert [recall.loaded for recall in recalls] == [length, length]
    assert [recall.back for recall in recalls] == [length, length]
    assert [recall.wrong for recall in recalls] == [[], []]
    assert [recall.lost for recall in recalls] == [0, 0]


@pytest.mark.parametrize(("topology", "trouble", "rank"), CASES)
def test_both_ranks_settle_at_what_both_have(pair, model, tmp_path, topology, trouble, rank):
    stores = Stores(tmp_path, TOPOLOGIES[topology].shard(rank))
    write(pair, model, topology, stores.url)
    url, pages = TROUBLES[trouble](stores)
    urls = [stores.url, stores.url]
    urls[rank] = url
    start(pair, model, topology, urls)
    check(pair.do("recall"), pages)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_pages_deleted_while_both_serve_end_the_prefix_of_both(pair, model, tmp_path, topology):
    stores = Stores(tmp_path, TOPOLOGIES[topology].shard(1))
    write(pair, model, topology, stores.url)
    delete(stores.url, depth=11, shard=stores.shard)
    check(pair.do("recall"), 11)
    # What was computed again is stored again, and the prefix is whole.
    pair.do("write", TOPOLOGIES[topology].mla)
    check(pair.do("recall"), PAGES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_store_removed_under_one_rank_is_a_miss_of_both(pair, model, tmp_path, topology):
    """Each rank has its own: two nodes, and one lost its disk."""
    urls = [f"file://{tmp_path}/{rank}" for rank in range(2)]
    write(pair, model, topology, urls[0])
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    start(pair, model, topology, urls)
    check(pair.do("recall"), PAGES)
    shutil.rmtree(tmp_path / "1")
    check(pair.do("recall"), 0)
