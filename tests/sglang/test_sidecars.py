"""Several host pools of one prefix (v2): sglang's own pools over real stores."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace

import host_pools
import pytest
import torch
from attached import attach, hashes, indices, register
from hicache_rank import make_model
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    count_pool_hits,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import qsa

from l3store import registry
from l3store.adapters.sglang import updates
from l3store.adapters.sglang.pools import bytes_of
from l3store.errors import ConfigError
from l3store.page import parse

ALL, TRAILING, GROUPS = (
    PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.BLOCK_GROUPS,
)  # fmt: skip
PAGES = 16


def small(builder, *args, **kw):
    return builder(*args, pages=PAGES, **kw)


ENGINES = {
    "dsa": lambda: {
        "kv": small(host_pools.mla, page_size=host_pools.INDEXER_PAGE_SIZE),
        "indexer": small(host_pools.indexer),
    },
    "dsa layer_first": lambda: {
        "kv": small(host_pools.mla, "layer_first", page_size=host_pools.INDEXER_PAGE_SIZE),
        "indexer": small(host_pools.indexer, "layer_first"),
    },
    "mamba": lambda: {
        "kv": small(host_pools.mha),
        "mamba": host_pools.mamba_states(slots=PAGES),
    },
    "mamba with side states": lambda: {
        "kv": small(host_pools.mha, "layer_first"),
        "mamba": host_pools.mamba_states(slots=PAGES, side_states=True),
    },
    "swa": lambda: {
        "kv": small(host_pools.mha),
        "swa": small(host_pools.mha, heads=2, layers=2),
    },
    "deepseek v4": lambda: {
        "kv": host_pools.logical(pages=PAGES),
        "swa": small(host_pools.v4_pages, name="swa"),
        "deepseek_v4_c4": small(host_pools.v4_pages, item_bytes=160),
        "deepseek_v4_c4_state": host_pools.v4_states(),
    },
}
V4 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(params=["memory", "nvme"])
def url(request, tmp_path):
    if request.param == "memory":
        return "memory://?capacity=64MiB"
    return f"nvme://{tmp_path}/store?capacity=64MiB"


@pytest.fixture
def serve(model):
    """Attaches engines; they end with the test."""
    ranks = []

    def start(url, engine, **more):
        pools = ENGINES[engine]()
        anchor = pools.pop("kv")
        args = V4 if engine == "deepseek v4" else {}
        ranks.append(attach(url, model, anchor, pools, **{"args": args, **more}))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.close()


def want(name, keys=None, at=None, *, policy=ALL, block=0, group=0):
    return PoolTransfer(
        name=PoolName(name), keys=keys, host_indices=at, hit_policy=policy, block_pages=block,
        group_pages=group,
    )  # fmt: skip


def pool_of(rank, name):
    return rank.registered_pools[PoolName(name)]


def store(rank, name, keys):
    """Stores pages of one pool under these keys, from its first host pages."""
    keys = list(keys)
    at = indices(pool_of(rank, name), range(len(keys)))
    assert rank.batch_set_v2([want(name, keys, at)]) == {name: [True] * len(keys)}


class TestWhichPrefixesCanBeRestored:
    def test_all_pages_end_at_the_first_that_is_missing(self, serve, url):
        """KV 10, indexer 7: usable 7."""
        rank, chain = serve(url, "dsa"), hashes(12)
        store(rank, "kv", chain[:10])
        store(rank, "indexer", [*chain[:7], *chain[8:10]])
        found = rank.batch_exists_v2(chain, [want("indexer")])
        assert found.kv_hit_pages == 7
        assert found.restorable_prefix_pages == list(range(1, 8))
        assert found.extra_pool_hit_pages == {"kv": 10, "indexer": 7}

    def test_kv_limits_as_well(self, serve, url):
        rank, chain = serve(url, "dsa"), hashes(12)
        store(rank, "kv", [*chain[:4], *chain[5:]])
        store(rank, "indexer", chain)
        found = rank.batch_exists_v2(chain, [want("indexer")])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])

    def test_one_trailing_page_makes_its_own_end_point_legal_and_no_other(self, serve, url):
        """{5} is legal, 4 and 3 are not."""
        rank, chain = serve(url, "mamba"), hashes(8)
        store(rank, "kv", chain[:6])
        store(rank, "mamba", [chain[4], chain[7]])
        for keys in (None, [], ["x" * 64]):  # as many as the window: one, or not told
            found = rank.batch_exists_v2(chain, [want("mamba", keys, policy=TRAILING)])
            assert found.kv_hit_pages == 5
            assert found.restorable_prefix_pages == [5]
            assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 5}

    def test_a_window_of_trailing_pages(self, serve, url):
        rank, chain = serve(url, "swa"), hashes(10)
        store(rank, "kv", chain)
        store(rank, "swa", [chain[0], *chain[3:6], *chain[7:9]])
        window = [want("swa", chain[:3], policy=TRAILING)]
        found = rank.batch_exists_v2(chain, window)
        # 1: all that there is of it; 6: pages 4 to 6. Page 7 is missing, so 8 and 9 are too few.
        assert found.restorable_prefix_pages == [1, 6]
        assert found.kv_hit_pages == 6
        assert rank.batch_exists_v2(chain[:5], window).restorable_prefix_pages == [1]

    def test_block_groups_are_told_and_never_limit(self, serve, url):
        rank, chain = serve(url, "dsa"), hashes(12)
        store(rank, "kv", chain)
        # Blocks of 4 pages, each kept by its last 2 hashes: two whole groups and a half.
        store(rank, "indexer", [*chain[2:4], *chain[6:8], chain[10]])
        asked = want("indexer", policy=GROUPS, block=4, group=2)
        found = rank.batch_exists_v2(chain, [asked])
        assert found.kv_hit_pages == 12
        assert found.restorable_prefix_pages == list(range(1, 13))
        assert found.extra_pool_hit_pages == {"kv": 12, "indexer": 8}
        asked.keys = [*chain[2:4], *chain[6:8]]
        assert rank.batch_exists_v2(chain, [asked]).extra_pool_hit_pages["indexer"] == 8

    @pytest.mark.parametrize(("block", "group"), [(0, 0), (4, 0), (2, 4)])
    def test_block_groups_without_a_geometry_cover_nothing(self, serve, block, group):
        rank, chain = serve("memory://", "dsa"), hashes(4)
        store(rank, "kv", chain)
        store(rank, "indexer", chain)
        asked = want("indexer", policy=GROUPS, block=block, group=group)
        found = rank.batch_exists_v2(chain, [asked])
        assert found.kv_hit_pages == 4
        assert found.extra_pool_hit_pages["indexer"] == 0

    @pytest.mark.parametrize("transfers", [None, []])
    def test_without_sidecars_it_is_the_run_of_kv(self, serve, url, transfers):
        rank, chain = serve(url, "dsa"), hashes(5)
        store(rank, "kv", [*chain[:3], chain[4]])
        found = rank.batch_exists_v2(chain, transfers)
        assert found.kv_hit_pages == rank.batch_exists(chain) == 3
        assert found.restorable_prefix_pages == [1, 2, 3]
        assert found.extra_pool_hit_pages == {"kv": 3}

    def test_a_pool_that_was_never_registered_has_nothing(self, serve):
        rank, chain = serve("memory://", "dsa"), hashes(4)
        store(rank, "kv", chain)
        for policy in (ALL, TRAILING):
            found = rank.batch_exists_v2(chain, [want("mamba", policy=policy)])
            assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
            assert found.extra_pool_hit_pages == {"kv": 4, "mamba": 0}

    def test_no_pages_have_no_prefix(self, serve, url):
        rank = serve(url, "dsa")
        found = rank.batch_exists_v2([], [want("indexer")])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])

    def test_a_store_that_is_closed_has_nothing(self, serve, url):
        rank, chain = serve(url, "mamba"), hashes(3)
        store(rank, "kv", chain)
        store(rank, "mamba", chain)
        rank.close()
        found = rank.batch_exists_v2(chain, [want("mamba", policy=TRAILING)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])

    def test_a_logical_anchor_follows_its_sidecars_alone(self, serve, url):
        rank, chain = serve(url, "deepseek v4"), hashes(10)
        store(rank, "deepseek_v4_c4", chain[:8])
        store(rank, "swa", chain[5:7])
        store(rank, "deepseek_v4_c4_state", chain[5:7])
        asked = [
            want("deepseek_v4_c4"),
            want("swa", chain[:2], policy=TRAILING),
            want("deepseek_v4_c4_state", chain[:2], policy=TRAILING),
        ]
        found = rank.batch_exists_v2(chain, asked)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (7, [7])
        assert found.extra_pool_hit_pages == {
            "kv": 10, "deepseek_v4_c4": 8, "swa": 7, "deepseek_v4_c4_state": 7,
        }  # fmt: skip
        assert rank.batch_exists(chain) == 0  # without a sidecar nothing is proven

    def test_after_an_update_of_the_weights_a_logical_anchor_has_nothing(self, serve, monkeypatch):
        rank, chain = serve("memory://", "deepseek v4"), hashes(3)
        store(rank, "deepseek_v4_c4", chain)
        assert rank.batch_exists_v2(chain, [want("deepseek_v4_c4")]).kv_hit_pages == 3
        monkeypatch.setattr(updates, "_count", updates.seen().count + 1)
        assert rank.batch_exists_v2(chain, [want("deepseek_v4_c4")]).kv_hit_pages == 0

    def test_a_logical_anchor_moves_no_bytes(self, serve, url):
        rank, chain = serve(url, "deepseek v4"), hashes(3)
        at = indices(rank.mem_pool_host, range(3))
        assert rank.batch_set_v1(chain, at) == [True] * 3
        assert rank.batch_get_v1(chain, at) == [True] * 3
        assert rank.batch_get_v2([want("kv", chain, at)]) == {"kv": [True] * 3}
        flat = [rank.mem_pool_host.get_data_page(0) for _ in chain]
        assert rank.batch_set(chain, flat) is True
        assert rank.batch_get(chain, flat) == flat


class TestAgainstTheEnginesOwn:
    """The same answers as sglang's `file` backend, which is its reference."""

    SIDECARS = ("swa", "deepseek_v4_c4", "deepseek_v4_c4_state")

    @pytest.fixture
    def reference(self, tmp_path, monkeypatch):
        monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="m",
        )  # fmt: skip
        return HiCacheFile(config, str(tmp_path / "reference"))

    @pytest.mark.parametrize("seed", range(3))
    def test_random_presence(self, model, reference, seed):
        pools = {name: small(host_pools.v4_pages, name=name) for name in self.SIDECARS}
        kv = small(host_pools.mha)
        rank = attach("memory://", model, kv, pools, args=V4)
        draw = random.Random(seed)
        answers = set()
        for trial in range(30):
            chain = hashes(12, prompt=f"{seed} {trial}")
            present = {"kv": draw.choice([0.7, 0.95, 1.0])}
            present |= {name: draw.choice([0.3, 0.7, 0.95, 1.0]) for name in pools}
            for name, share in present.items():
                keys = [key for key in chain if draw.random() < share]
                store(rank, name, keys)
                for key in keys:  # of these files it looks at the names alone
                    file = f"{reference._get_component_key(key, name)}.bin"
                    (Path(reference.file_path) / file).touch()
            asked = [
                want(name, chain[: draw.randrange(4)], policy=draw.choice([ALL, TRAILING]))
                for name in draw.sample(self.SIDECARS, draw.randint(0, 3))
            ]
            theirs = reference.batch_exists_v2(chain, asked)
            ours = rank.batch_exists_v2(chain, asked)
            assert ours.kv_hit_pages == theirs.kv_hit_pages
            assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
            # They leave out what has nothing, and all pools once no prefix is left.
            told = ours.extra_pool_hit_pages
            assert {name: told[name] for name in theirs.extra_pool_hit_pages} == (
                theirs.extra_pool_hit_pages
            )
            assert set(told) == {"kv", *(str(one.name) for one in asked)}
            answers.add((ours.kv_hit_pages, len(ours.restorable_prefix_pages)))
        assert len(answers) > 5
        assert any(hit > count for hit, count in answers)  # end points with holes between them
        rank.close()


class TestRanksMeet:
    """What sglang's controller makes of the answers of two ranks: it intersects their sets."""

    @pytest.mark.parametrize(
        ("first", "second", "usable"),
        [({1, 3}, {1, 2}, 1), ({3}, {2}, 0), ({2, 5}, {2, 5}, 5), (set(), {4}, 0)],
    )
    def test_at_an_end_point_that_is_legal_on_both(self, serve, first, second, usable):
        chain, answers = hashes(5), []
        for legal in (first, second):
            rank = serve("memory://", "mamba")
            store(rank, "kv", chain)
            store(rank, "mamba", [chain[end - 1] for end in sorted(legal)])
            answers.append(rank.batch_exists_v2(chain, [want("mamba", policy=TRAILING)]))
        assert self.agreed(answers, pages=5) == usable

    def agreed(self, answers, pages):
        """Runs the controller's own step on two threads, as two ranks whose MIN is taken here."""
        votes, barrier, results = {}, Barrier(2), {}

        def reduce(rank):
            def all_reduce(packed, op, groups):
                assert op == torch.distributed.ReduceOp.MIN
                votes[rank] = packed.clone()
                barrier.wait(10)
                packed.copy_(torch.minimum(votes[0], votes[1]))

            return all_reduce

        def run(rank):
            answer = answers[rank]
            operation = SimpleNamespace(
                pool_transfers=[want("mamba", policy=TRAILING)], token_ids=range(pages * 4),
                pool_storage_result=answer, query_pool_hit_pages={},
            )  # fmt: skip
            controller = SimpleNamespace(
                page_size=4, prefetch_hits_sync_groups=[], _all_reduce=reduce(rank)
            )
            results[rank] = HybridCacheController._sync_prefetch_hit_query(
                controller, operation, answer.kv_hit_pages * 4
            )

        threads = [Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert results[0] == results[1]
        return results[0] // 4


@pytest.mark.parametrize("engine", ENGINES)
def test_all_pools_come_back_byte_for_byte(serve, url, engine):
    """Stored from some host pages, read into others, all pools in one call."""
    rank, chain = serve(url, engine), hashes(5)
    names = [name for name in ENGINES[engine]() if engine != "deepseek v4" or name != "kv"]
    kept, asked = {}, []
    for seed, name in enumerate(names):
        pool = pool_of(rank, name)
        pool.allocator.fill(seed)
        kept[name] = pages_of(pool, range(5))
        asked.append(want(name, chain, indices(pool, range(5))))
    assert rank.batch_set_v2(asked) == {name: [True] * 5 for name in names}
    assert len({page for pages in kept.values() for page in pages}) == 5 * len(names)
    to = [6, 3, 5, 0, 4]
    for name, one in zip(names, asked, strict=True):
        pool_of(rank, name).allocator.fill(99)
        one.host_indices = indices(pool_of(rank, name), to)
    got = rank.batch_get_v2(asked)
    assert got == {name: [True] * 5 for name in names}
    assert count_pool_hits(got) == dict.fromkeys(names, 5)  # as sglang reads the answer
    for name in names:
        pool = pool_of(rank, name)
        same = [a == b for a, b in zip(pages_of(pool, to), kept[name], strict=True)]
        assert same == [True] * 5, name
        assert pool.allocator.guards_hold()


@pytest.mark.parametrize("tp", [0, 1])
def test_whoever_is_told_to_write_writes_all_that_it_is_told(model, url, tp):
    """Of an MLA model the engine lets TP rank 0 alone write KV, but each rank writes its states."""
    pools = {"mamba": host_pools.mamba_states(slots=PAGES)}
    ranks = {"is_mla_model": True, "tp_rank": tp, "tp_size": 2}
    rank, chain = attach(url, model, small(host_pools.mla), pools, ranks=ranks), hashes(3)
    asked = [want(name, chain, indices(pool_of(rank, name), range(3))) for name in ("kv", "mamba")]
    assert rank.batch_set_v2(asked) == {"kv": [True] * 3, "mamba": [True] * 3}
    found = {key.split("/", 1)[1] for key in rank._store.scan()}
    assert found == {f"{place}/{key}" for place in ("kv/all", f"mamba/T{tp}of2") for key in chain}
    rank.close()


def pages_of(pool, numbers):
    return [bytes(bytes_of(pool.get_data_page(number * pool.page_size))) for number in numbers]


class TestTransfers:
    def test_of_nothing(self, serve, url):
        rank = serve(url, "mamba")
        assert rank.batch_get_v2([]) == {}
        assert rank.batch_set_v2([]) == {}
        for keys in (None, []):
            for at in (None, torch.empty(0, dtype=torch.int64)):
                assert rank.batch_get_v2([want("mamba", keys, at)]) == {"mamba": []}
                assert rank.batch_set_v2([want("mamba", keys, at)]) == {"mamba": []}

    def test_a_sidecar_has_pages_of_its_own_size(self, serve, url):
        """A state of mamba is one index long, whatever the page size of KV."""
        rank, chain = serve(url, "mamba"), hashes(2)
        assert pool_of(rank, "mamba").page_size == 1 != pool_of(rank, "kv").page_size
        assert rank.batch_set_v2([want("mamba", chain, torch.tensor([3, 9]))]) == {
            "mamba": [True, True]
        }
        four_each = indices(pool_of(rank, "kv"), [0, 1])
        assert rank.batch_set_v2([want("mamba", chain, four_each)]) == {"mamba": [False, False]}

    @pytest.mark.parametrize("wrong", ["none", "too few", "too many", "outside"])
    def test_a_wrong_one_fails_alone(self, serve, wrong):
        rank, chain = serve("memory://", "swa"), hashes(2)
        good = indices(pool_of(rank, "swa"), [0, 1])
        at = {
            "none": None,
            "too few": good[:-1],
            "too many": indices(pool_of(rank, "swa"), [0, 1, 2]),
            "outside": indices(pool_of(rank, "swa"), [0, PAGES]),
        }[wrong]
        mixed = [want("swa", chain, at), want("kv", chain, indices(pool_of(rank, "kv"), [2, 3]))]
        assert rank.batch_set_v2(mixed) == {"swa": [False] * 2, "kv": [True] * 2}
        assert rank.batch_get_v2(mixed) == {"swa": [False] * 2, "kv": [True] * 2}
        assert rank.outcomes()["set", "refused"] == 2

    def test_of_a_pool_that_was_never_registered(self, serve):
        rank, chain = serve("memory://", "swa"), hashes(2)
        lost = [want("mamba", chain, torch.tensor([0, 1]))]
        assert rank.batch_set_v2(lost) == {"mamba": [False, False]}
        assert rank.batch_get_v2(lost) == {"mamba": [False, False]}

    def test_a_page_that_is_missing_is_missing_alone(self, serve, url):
        rank, chain = serve(url, "dsa"), hashes(4)
        store(rank, "indexer", [chain[0], chain[2]])
        at = indices(pool_of(rank, "indexer"), range(4))
        assert rank.batch_get_v2([want("indexer", chain, at)]) == {
            "indexer": [True, False, True, False]
        }

    def test_answers_are_found_by_name_and_by_its_text(self, serve):
        """sglang looks them up both ways."""
        rank, chain = serve("memory://", "dsa"), hashes(1)
        store(rank, "indexer", chain)
        at = indices(pool_of(rank, "indexer"), [0])
        for answer in (
            rank.batch_get_v2([want("indexer", chain, at)]),
            rank.batch_exists_v2(chain, [want("indexer")]).extra_pool_hit_pages,
        ):
            assert answer[PoolName.INDEXER] == answer["indexer"]

    def test_a_damaged_page_of_a_sidecar_is_a_miss_and_heals(self, serve, tmp_path):
        rank, chain = serve(f"nvme://{tmp_path}/store?capacity=64MiB", "mamba"), hashes(3)
        pool = pool_of(rank, "mamba")
        pool.allocator.fill(7)
        store(rank, "kv", chain)
        store(rank, "mamba", chain)
        kept = pages_of(pool, range(3))
        damage(tmp_path / "store", kept[1])
        asked = [want("mamba", chain, indices(pool, [4, 5, 6]))]
        assert rank.batch_get_v2(asked) == {"mamba": [True, False, True]}
        assert rank.outcomes()["get", "integrity"] == 1
        found = rank.batch_exists_v2(chain, [want("mamba", policy=TRAILING)])
        assert found.restorable_prefix_pages == [1, 3]  # whoever sees it, removes it
        store(rank, "mamba", chain)
        assert rank.batch_get_v2(asked) == {"mamba": [True] * 3}
        same = [a == b for a, b in zip(pages_of(pool, [4, 5, 6]), kept, strict=True)]
        assert all(same)


def damage(root, page):
    """Flips a bit in the middle of a page that lies somewhere below `root`."""
    ((path, at),) = [
        (path, at + len(page) // 2)
        for path in root.rglob("*")
        if path.is_file() and (at := path.read_bytes().find(page)) >= 0
    ]
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class TestParents:
    """By which stores evict tails of chains, and tools find what is unreachable."""

    @pytest.mark.parametrize(
        ("engine", "name", "policy", "told"),
        [("dsa", "indexer", ALL, True), ("swa", "swa", TRAILING, False)],
    )
    def test_are_those_of_pools_that_have_all_pages(
        self, serve, tmp_path, engine, name, policy, told
    ):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        rank, chain = serve(url, engine), hashes(6)
        at = indices(pool_of(rank, name), range(3))
        stored = rank.batch_set_v2(
            [want(name, chain[3:], at, policy=policy)],
            HiCacheStorageExtraInfo(prefix_keys=chain[:3]),
        )
        assert stored == {name: [True] * 3}
        rank.close()
        with closing(registry.open(url, raw=True)) as opened:
            keys = list(opened.scan())
            headers = [parse(header) for header in opened.headers(keys)]
        found = {h.page_hash.hex(): (h.parent and h.parent.hex(), h.depth) for h in headers}
        # Within a call pages follow each other; before a window there is nothing to follow.
        before = [(chain[2], 3) if told else (None, None)]
        after = [(chain[i - 1], i if told else None) for i in (4, 5)]
        assert found == dict(zip(chain[3:], before + after, strict=True))


class TestRegistration:
    def test_a_sidecar_that_comes_while_serving(self, model, url):
        rank, chain = attach(url, model, small(host_pools.mha)), hashes(3)
        store(rank, "kv", chain)
        assert rank.batch_exists_v2(chain, [want("swa")]).kv_hit_pages == 0
        register(rank, {"swa": small(host_pools.mha, heads=2)})
        store(rank, "swa", chain[:2])
        assert rank.batch_exists_v2(chain, [want("swa")]).kv_hit_pages == 2
        rank.close()

    def test_one_that_cannot_be_served_comes_while_serving(self, model, caplog):
        rank, chain = attach("memory://", model, small(host_pools.mha)), hashes(2)
        odd = qsa.QSAIndexerPoolHost.__new__(qsa.QSAIndexerPoolHost)
        register(rank, {"indexer": odd})
        assert "'indexer' stays without L3" in caplog.text
        assert "QSAIndexerPoolHost" in caplog.text
        store(rank, "kv", chain)
        assert rank.batch_exists_v2(chain, [want("indexer")]).kv_hit_pages == 0
        assert rank.batch_set_v2([want("indexer", chain, torch.tensor([0, 1]))]) == {
            "indexer": [False, False]
        }
        rank.close()

    def test_one_that_cannot_be_served_at_the_start_fails_the_attach(self, model):
        odd = qsa.QSAIndexerPoolHost.__new__(qsa.QSAIndexerPoolHost)
        with pytest.raises(ConfigError, match="'indexer' is a QSAIndexerPoolHost"):
            attach("memory://", model, small(host_pools.mha), {"indexer": odd})

    def test_engines_with_other_pages_have_other_sidecars(self, model, tmp_path):
        """A state has a page size of its own, but it is that at the end of a page of tokens."""
        at = f"file://{tmp_path}/store"
        for page_size in (4, 8):
            pools = {"mamba": host_pools.mamba_states()}
            attach(at, model, host_pools.mha(page_size=page_size), pools).close()
        with closing(registry.open(at)) as store:
            names = [name for name in store.list_meta() if name.endswith("/mamba/all")]
        assert len(names) == 2

    def test_pools_of_one_kind_do_not_share_names(self, model, url):
        """A page hash is the same in all pools: their places keep them apart."""
        pools = {"swa": small(host_pools.mha), "draft": small(host_pools.mha)}
        rank, chain = attach(url, model, small(host_pools.mha), pools), hashes(1)
        for seed, name in enumerate(["kv", "swa", "draft"]):
            pool_of(rank, name).allocator.fill(seed)
            store(rank, name, chain)
        kept = {name: pages_of(pool_of(rank, name), [0]) for name in ["kv", "swa", "draft"]}
        for name, page in kept.items():
            pool = pool_of(rank, name)
            assert rank.batch_get_v2([want(name, chain, indices(pool, [3]))]) == {name: [True]}
            assert (pages_of(pool, [3]) == page) is True
        rank.close()
