"""Where the pages of sglang's host pools lie: each kind of pool, built by sglang itself."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from dataclasses import replace

import host_pools
import pytest
import sglang_on_cpu.kvcacheio
import torch
from attached import attach, hashes, indices
from hicache_rank import make_model
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import dsa, mamba, page_interleave, qsa, unified
from sglang.srt.mem_cache.pool_host import mha as mha_pools
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

from l3store import registry
from l3store.adapters.sglang.pools import Copied, InPlace, bytes_of, cut_flat, kind_of, pages_of
from l3store.errors import ConfigError
from l3store.keys import Coordinate, head_group_shards
from l3store.wrap._base import Wrapper

PAGE_FIRST = ("page_first", "page_first_direct")
LAYOUTS = ("layer_first", *PAGE_FIRST)

IN_PLACE = {
    **{f"mha {layout}": (host_pools.mha, layout) for layout in (*LAYOUTS, "page_head")},
    **{f"mha fp32 {layout}": (host_pools.mha, layout, {"dtype": torch.float32})
       for layout in LAYOUTS},
    **{f"asymmetric mha {layout}": (host_pools.mha, layout, {"v_head_dim": 6})
       for layout in PAGE_FIRST},
    **{f"mla {layout}": (host_pools.mla, layout) for layout in LAYOUTS},
    **{f"indexer {layout}": (host_pools.indexer, layout) for layout in PAGE_FIRST},
    **{f"mamba {layout}": (host_pools.mamba_states, layout) for layout in PAGE_FIRST},
    "mamba without temporal state": (host_pools.mamba_states, "page_first", {"conv_only": True}),
    **{f"v4 pages {layout}": (host_pools.v4_pages, layout) for layout in LAYOUTS},
    **{f"v4 states {layout}": (host_pools.v4_states, layout) for layout in LAYOUTS},
}  # fmt: skip
COPIED = {
    "indexer layer_first": (host_pools.indexer, "layer_first"),
    **{f"mamba with side states {layout}": (host_pools.mamba_states, layout, {"side_states": True})
       for layout in PAGE_FIRST},
}  # fmt: skip
ALL = IN_PLACE | COPIED
PAIRED = ("mha", "asymmetric mha")  # sglang tells K, V, K, V, ... of these


def build(case):
    """Returns a pool that is full of random bytes, and how its pages move."""
    builder, layout, more = (*ALL[case], {})[:3]
    pool = builder(layout, **more)
    pool.allocator.fill(seed=1)
    return pool, pages_of("pool", pool, kind_of("pool", pool))


def flat(pool, number):
    """Returns the bytes of one page, as the copying interface moves them."""
    at = number * pool.page_size
    if pool.layout in PAGE_FIRST and getattr(pool, "v_head_dim", 0) != getattr(pool, "head_dim", 0):
        # sglang's asymmetric pool has no flat page: by its two buffers, K then V.
        rows = at if pool.layout == "page_first" else number
        count = pool.page_size if pool.layout == "page_first" else 1
        parts = [buffer[rows : rows + count] for buffer in (pool.k_buffer, pool.v_buffer)]
        return b"".join(bytes(bytes_of(part)) for part in parts)
    return bytes(bytes_of(pool.get_data_page(at)))


def address(piece):
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(piece))


def in_any(memories, start, size):
    return any(m.data_ptr() <= start and start + size <= m.data_ptr() + len(m) for m in memories)


def some_pages(seed):
    """Page numbers in disorder, the first and the last among them."""
    numbers = [0, host_pools.PAGES - 1, *random.Random(seed).choices(range(host_pools.PAGES), k=4)]
    random.Random(seed).shuffle(numbers)
    return numbers


@pytest.mark.parametrize("case", ALL)
def test_a_pool_that_tells_addresses_is_served_in_place(case):
    pool, pages = build(case)
    assert isinstance(pages, InPlace if case in IN_PLACE else Copied)
    assert pages.page_tokens == pool.page_size
    assert pages.count == host_pools.PAGES


def test_a_pool_without_bytes_has_no_pages():
    pool = host_pools.logical()
    assert pages_of("kv", pool, kind_of("kv", pool)) is None


@pytest.mark.parametrize("case", IN_PLACE)
def test_the_table_says_what_the_pool_says(case):
    pool, pages = build(case)
    numbers = some_pages(seed=2)
    pointers, sizes = pool.get_page_buffer_meta(indices(pool, numbers))
    width = len(pointers) // len(numbers)
    for i, (_, *pieces) in enumerate(pages.framed(numbers)):
        told = list(zip(pointers, sizes, strict=True))[i * width : (i + 1) * width]
        if case.startswith(PAIRED):
            told = told[0::2] + told[1::2]
        assert [(address(piece), piece.nbytes) for piece in pieces] == told


@pytest.mark.parametrize("case", IN_PLACE)
def test_pieces_are_the_flat_page(case):
    pool, pages = build(case)
    numbers = some_pages(seed=3)
    found = [b"".join(page[1:]) for page in pages.framed(numbers)]
    same = [page == flat(pool, number) for page, number in zip(found, numbers, strict=True)]
    assert all(same)
    assert len(set(found)) == len(set(numbers))  # or all of them were equal bytes


@pytest.mark.parametrize("case", [case for case in IN_PLACE if "asymmetric" not in case])
def test_pieces_are_written_where_the_flat_page_is_set(case):
    pool, pages = build(case)
    before = pool.allocator.copy()
    for number in (0, 3, host_pools.PAGES - 1):
        page = torch.randint(256, (sum(pages.segment_bytes()),), dtype=torch.uint8)
        dtype = pool.get_dummy_flat_data_page().dtype
        pool.set_from_flat_data_page(number * pool.page_size, page.view(dtype))
        expected = pool.allocator.copy()
        assert not pool.allocator.equals(before)
        pool.allocator.restore(before)
        at = 0
        for piece in pages.framed([number])[0][1:]:
            piece[:] = bytes(page[at : at + piece.nbytes].numpy())
            at += piece.nbytes
        assert pool.allocator.equals(expected)
        pool.allocator.restore(before)
    assert pool.allocator.guards_hold()


@pytest.mark.parametrize("case", ALL)
def test_segments_have_the_size_they_are_said_to_have(case):
    pool, pages = build(case)
    assert sum(pages.segment_bytes()) == len(flat(pool, 1))
    if case in IN_PLACE:
        assert pages.segment_bytes() == tuple(piece.nbytes for piece in pages.framed([1])[0][1:])


@pytest.mark.parametrize("case", IN_PLACE)
def test_registered_memory_is_the_pools_and_holds_every_piece(case):
    pool, pages = build(case)
    memories = pool.allocator.memory
    for start, region in pages.regions:
        assert address(region) == start
        assert in_any(memories, start, region.nbytes)
    held = [(start, start + region.nbytes) for start, region in pages.regions]
    for _, *pieces in pages.framed(range(pages.count)):
        for piece in pieces:
            start = address(piece)
            assert any(low <= start and start + piece.nbytes <= high for low, high in held)


@pytest.mark.parametrize("case", COPIED)
def test_copies_are_the_flat_page_and_only_good_ones_are_put_back(case):
    pool, pages = build(case)
    numbers = [5, 0, 2]
    assert [bytes(page) for (page,) in pages.taken(numbers)] == [flat(pool, n) for n in numbers]
    before = [flat(pool, number) for number in range(host_pools.PAGES)]
    blank = pages.blank(numbers)
    for page in blank:
        bytes_of(page)[:] = random.Random(4).randbytes(len(before[0]))
    pages.put(numbers, blank, [True, False, True])
    after = [flat(pool, number) for number in range(host_pools.PAGES)]
    assert [n for n in range(host_pools.PAGES) if after[n] != before[n]] == [2, 5]
    assert after[5] == bytes(bytes_of(blank[0]))
    assert pool.allocator.guards_hold()


def test_a_pool_of_one_page():
    pool = host_pools.mha("page_first", pages=1)
    pool.allocator.fill(seed=4)
    pages = pages_of("kv", pool, kind_of("kv", pool))
    found = (
        [page[1:] for page in pages.framed([0])] if isinstance(pages, InPlace) else pages.taken([0])
    )
    assert b"".join(found[0]) == flat(pool, 0)


class TestHeadGroups:
    """A page of the layout page_head as several objects, by heads."""

    @pytest.mark.parametrize("groups", [2, 4])
    def test_pieces_are_what_the_pool_says_and_the_flat_page_cut(self, groups):
        pool = host_pools.mha("page_head", heads=4)
        pool.allocator.fill(seed=5)
        pages = pages_of("kv", pool, kind_of("kv", pool), groups)
        numbers = some_pages(seed=6)
        pointers, _ = pool.get_split_heads_page_buffer_meta(indices(pool, numbers), groups)
        for i, number in enumerate(numbers):
            cut = cut_flat(bytes_of(pool.get_data_page(number * pool.page_size)), groups)
            for group in range(groups):
                pieces = pages.framed([number], group)[0][1:]
                told = pointers[(i * groups + group) * 2 : (i * groups + group) * 2 + 2]
                assert [address(piece) for piece in pieces] == told
                assert [piece == half for piece, half in zip(pieces, cut[group], strict=True)] == [
                    True, True,
                ]  # fmt: skip
                assert pages.segment_bytes(group) == tuple(piece.nbytes for piece in pieces)

    def test_tp2_and_tp4_make_the_same_objects_of_the_same_heads(self):
        whole = host_pools.mha("page_head", heads=4)
        whole.allocator.fill(seed=7)
        objects = {}
        for tp_size in (2, 4):
            heads = groups = 4 // tp_size
            for tp in range(tp_size):
                pool = host_pools.mha("page_head", heads=heads)
                pool.kv_buffer.copy_(whole.kv_buffer[:, :, tp * heads : (tp + 1) * heads])
                pages = pages_of("kv", pool, kind_of("kv", pool), groups)
                shards = head_group_shards(Coordinate(tp=tp, tp_size=tp_size), 4)
                for part, shard in enumerate(shards):
                    content = b"".join(pages.framed([3], part)[0][1:])
                    objects.setdefault(shard, set()).add(content)
        assert {shard: len(contents) for shard, contents in objects.items()} == {
            f"G{i}of4": 1 for i in range(4)
        }

    @pytest.mark.parametrize("v1", [True, False])
    def test_tp4_reads_what_tp2_stored(self, model, tmp_path, v1):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        whole = host_pools.mha("page_head", heads=4)
        whole.allocator.fill(seed=8)
        keys, numbers = hashes(3), [1, 6, 2]
        for tp_size in (2, 4):
            heads = 4 // tp_size
            for tp in range(tp_size):
                part = whole.kv_buffer[:, :, tp * heads : (tp + 1) * heads]
                pool = host_pools.mha("page_head", heads=heads)
                ranks = {"tp_rank": tp, "tp_size": tp_size, "tp_lcm_size": 4}
                rank = attach(url, model, pool, ranks=ranks)
                if tp_size == 2:
                    pool.kv_buffer.copy_(part)
                    flats = [pool.get_data_page(n * pool.page_size) for n in numbers]
                    stored = (
                        rank.batch_set_v1(keys, indices(pool, numbers))
                        if v1
                        else [rank.batch_set(keys, flats)] * 3
                    )
                    assert stored == [True] * 3
                else:
                    assert rank.batch_exists(keys) == 3
                    assert rank.batch_get_v1(keys, indices(pool, numbers)) == [True] * 3
                    assert torch.equal(
                        pool.kv_buffer[:, numbers].view(torch.uint8),
                        part[:, numbers].contiguous().view(torch.uint8),
                    )
                    into = [pool.get_dummy_flat_data_page() for _ in keys]
                    assert all(page is not None for page in rank.batch_get(keys, into))
                    same = [
                        bytes(bytes_of(page)) == flat(pool, n)
                        for page, n in zip(into, numbers, strict=True)
                    ]
                    assert all(same)
                rank.close()

    def test_a_page_is_there_when_all_its_groups_are(self, model, tmp_path):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        keys, numbers = hashes(3), [0, 1, 2]
        for tp, stored in ((0, [0, 1, 2]), (1, [0, 2])):  # the second page: one half only
            pool = host_pools.mha("page_head", heads=2)
            ranks = {"tp_rank": tp, "tp_size": 2, "tp_lcm_size": 2}
            rank = attach(url, model, pool, ranks=ranks)
            at = indices(pool, stored)
            assert rank.batch_set_v1([keys[n] for n in stored], at) == [True] * len(stored)
            rank.close()
        pool = host_pools.mha("page_head", heads=4)
        rank = attach(url, model, pool, ranks={"tp_lcm_size": 2})
        assert rank.batch_exists(keys) == 1
        found = rank.batch_exists_v2(keys, [transfer("kv", None, None)])
        assert found.restorable_prefix_pages == [1]
        assert rank.batch_get_v1(keys, indices(pool, numbers)) == [True, False, True]
        into = [pool.get_dummy_flat_data_page() for _ in keys]
        assert [page is not None for page in rank.batch_get(keys, into)] == [True, False, True]
        rank.close()

    def test_heads_that_groups_do_not_divide_are_refused(self, model, tmp_path):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        pool = host_pools.mha("page_head", heads=3)
        with pytest.raises(ConfigError, match="tp_lcm_size 2: the 3 KV heads"):
            attach(url, model, pool, ranks={"tp_lcm_size": 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


WRONG = {
    "none at all": None,
    "one page too few": lambda pool: indices(pool, [1, 2]),
    "one page too many": lambda pool: indices(pool, [1, 2, 3, 4]),
    "one token too few": lambda pool: indices(pool, [1, 2, 3])[:-1],
    "not aligned": lambda pool: indices(pool, [1, 2, 3]) + 1,
    "behind the pool": lambda pool: indices(pool, [1, 2, host_pools.PAGES]),
    "far behind the pool": lambda pool: indices(pool, [1, 2, 1 << 40]),
    "before the pool": lambda pool: indices(pool, [-1, 1, 2]),
}


class TestIndices:
    """Host indices that no pages of the pool can be meant by."""

    @pytest.fixture(
        scope="class", params=["mha layer_first", "mha page_first", "indexer layer_first"]
    )
    def one(self, request, model):
        """A pool, its name, and the adapter over it, with three pages in the store."""
        pool, _ = build(request.param)
        name, anchor, sidecars = "kv", pool, {}
        if request.param.startswith("indexer"):
            anchor = host_pools.mla("layer_first", page_size=pool.page_size)
            name, sidecars = "indexer", {"indexer": pool}
        rank = attach("memory://", model, anchor, sidecars)
        assert set_pages(rank, name, hashes(3), indices(pool, [3, 4, 5])) == [True] * 3
        yield pool, name, rank
        rank.close()

    @pytest.mark.parametrize("wrong", WRONG)
    def test_are_refused_for_all_pages_and_nothing_is_touched(self, one, wrong):
        pool, name, rank = one
        before, told = pool.allocator.copy(), Counter(rank.outcomes())
        given = WRONG[wrong] and WRONG[wrong](pool)
        assert get_pages(rank, name, hashes(3), given) == [False] * 3
        assert set_pages(rank, name, hashes(3, prompt="b"), given) == [False] * 3
        assert pool.allocator.equals(before)
        assert pool.allocator.guards_hold()
        assert Counter(rank.outcomes()) - told == {("get", "refused"): 3, ("set", "refused"): 3}
        # Nothing of it is in the store: there is nothing to read.
        missing = get_pages(rank, name, hashes(3, prompt="b"), indices(pool, [0, 1, 2]))
        assert missing == [False] * 3

    def test_no_pages_are_no_call(self, model):
        pool, _ = build("mha page_first")
        rank = attach("memory://", model, pool)
        assert rank.batch_get_v1([], indices(pool, [])) == []
        assert rank.batch_set_v1([], indices(pool, [])) == []
        assert rank.batch_get([], []) == []
        assert rank.outcomes() == {}
        rank.close()


def set_pages(rank, name, keys, host_indices):
    if name == "kv":
        return rank.batch_set_v1(keys, host_indices)
    return rank.batch_set_v2([transfer(name, keys, host_indices)])[name]


def get_pages(rank, name, keys, host_indices):
    if name == "kv":
        return rank.batch_get_v1(keys, host_indices)
    return rank.batch_get_v2([transfer(name, keys, host_indices)])[name]


def transfer(name, keys, host_indices):
    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=host_indices)


def unbuilt(cls, **attributes):
    """Returns an object of a pool class that a CPU cannot build; what is looked at is its class."""
    pool = cls.__new__(cls)
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


class TestRefused:
    """Pools whose pages cannot be told apart from others: the message names pool and reason."""

    @pytest.mark.parametrize(
        "cls",
        [
            MHATokenToKVPoolMXFP8Host,  # scales beside the rows
            mha_pools.MHATokenToKOnlyPoolHost,
            mha_pools.HiSparseMHATokenToKVPoolHost,
            qsa.QSAIndexerPoolHost,  # a subclass of one that is served
            page_interleave.PageInterleaveHostPool,
        ],
    )
    def test_unknown_classes(self, cls):
        if cls is page_interleave.PageInterleaveHostPool:  # hands on what it does not have
            pool = unbuilt(cls, host_pool=host_pools.mha())
        else:
            pool = unbuilt(cls, layout="page_first")
        with pytest.raises(ConfigError, match=f"'swa' is a {cls.__name__}") as raised:
            kind_of("swa", pool)
        assert "MHATokenToKVPoolHost" in str(raised.value)

    def test_page_envelopes(self):
        pool = unbuilt(unified.UnifiedPageEnvelopeHostPool, layout="page_first")
        with pytest.raises(ConfigError, match=r"'kv'.*envelope"):
            kind_of("kv", pool)

    def test_the_layout_page_unified(self):
        with pytest.raises(ConfigError, match=r"'kv' has layout 'page_unified'.*page_first"):
            kind_of("kv", host_pools.mha("page_unified"))

    def test_the_layout_page_first_kv_split(self):
        with pytest.raises(ConfigError, match="'kv' has layout 'page_first_kv_split'"):
            kind_of("kv", host_pools.mla_split())

    def test_addresses_that_are_not_affine(self):
        class Odd:
            page_size, size = host_pools.PAGE_SIZE, host_pools.PAGES * host_pools.PAGE_SIZE
            pool = host_pools.mha("page_first")

            def get_page_buffer_meta(self, host_indices):
                pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
                last = int(host_indices[0]) == self.size - self.page_size
                return [pointer - 2 * last for pointer in pointers], sizes

        with pytest.raises(ConfigError, match="addresses of a Odd are not affine"):
            InPlace(Odd(), kind_of("kv", Odd.pool))

    def test_an_attach_with_one_of_them_fails(self, model, tmp_path):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        odd = unbuilt(qsa.QSAIndexerPoolHost, layout="page_first")
        with pytest.raises(ConfigError, match="'indexer' is a QSAIndexerPoolHost"):
            attach(url, model, host_pools.mha(), {"indexer": odd})


class TestRawBytes:
    """Pools of both fp8 kinds say uint8: only the logical dtype tells them apart."""

    def attached(self, url, model, dtype=None, **args):
        pool = host_pools.mha(dtype=torch.uint8)
        return attach(url, model, pool, args=args, **({"dtype": dtype} if dtype else {}))

    def test_are_refused_when_nobody_says_which(self, model):
        with pytest.raises(ConfigError, match=r"'kv' says 'uint8'.*--kv-cache-dtype.*'dtype'"):
            self.attached("memory://", model)

    def test_neither_kind_reads_the_others_pages(self, model, tmp_path):
        url = f"nvme://{tmp_path}/store?capacity=64MiB"
        hits = {}
        for told in (
            {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3"},
            {"kv_cache_dtype": "fp8_e5m2"}, {"dtype": "fp8_e5m2"},
        ):  # fmt: skip
            rank = self.attached(url, model, **told)
            (kind,) = told.values()
            hits.setdefault(kind, []).append(rank.batch_exists(hashes(2)))
            at = indices(rank.mem_pool_host, [0, 1])
            assert rank.batch_set_v1(hashes(2), at) == [True, True]
            rank.close()
        assert hits == {"fp8_e4m3": [0, 2], "fp8_e5m2": [0, 2]}

    def test_an_option_that_contradicts_the_engine_is_refused(self, model):
        with pytest.raises(ConfigError, match=r"'fp8_e4m3', but the engine .* fp8_e5m2"):
            self.attached("memory://", model, dtype="fp8_e4m3", kv_cache_dtype="fp8_e5m2")

    def test_what_the_engine_made_of_its_arguments_is_enough(self, model):
        """sglang keeps arguments as given, and tells elsewhere what it made of them."""
        pool = host_pools.mha(dtype=torch.uint8)
        resolved = {"kv_cache_dtype": "fp8_e4m3"}
        attach("memory://", model, pool, resolved=resolved).close()


OPAQUE = {
    "indexer": (host_pools.indexer, LAYOUTS, lambda pool: pool.packed_device_index_buffers),
    "mamba": (
        host_pools.mamba_states,
        PAGE_FIRST,
        lambda pool: (pool.buffer_info.temporal, *pool.buffer_info.conv),
    ),
    "deepseek_v4_c4": (host_pools.v4_pages, LAYOUTS, lambda pool: pool.device_buffers),
    "deepseek_v4_c4_state": (host_pools.v4_states, LAYOUTS, lambda pool: pool.device_page_views),
}
"""Name of a pool -> who builds it, in which layouts, and what it mirrors of the device."""


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_pages_are_the_same_in_every_layout(name, model, tmp_path, monkeypatch):
    """sglang itself copies them from the device; then each layout reads what each other stored."""
    for module in (memory_pool_host, dsa, mamba):
        for kernel, function in vars(sglang_on_cpu.kvcacheio).items():
            if kernel.startswith("transfer_kv_"):
                monkeypatch.setattr(module, kernel, function, raising=False)
    builder, layouts, mirrored = OPAQUE[name]
    url = f"nvme://{tmp_path}/store?capacity=64MiB"
    places, pages = set(), []
    for page, layout in enumerate(layouts):
        pool = builder(layout)
        generator = torch.Generator().manual_seed(5)
        for tensor in mirrored(pool):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator))
        here, there = (indices(pool, [number]) for number in (page, 0))
        io = "kernel" if layout == "page_first" and name != "mamba" else "direct"
        pool.backup_from_device_all_layer(getattr(pool, "device_pool", None), here, there, io)
        pages.append(flat(pool, page))
        stored = pool.allocator.copy()

        anchor = host_pools.mla(layout, page_size=pool.page_size)
        args = {"kv_cache_dtype": "fp8_e4m3"}
        rank = attach(url, model, anchor, {name: pool}, args=args)
        places.update(rank._pools[name].places)
        keys = hashes(page + 1)
        for known, key in enumerate(keys[:-1]):
            pool.allocator.fill(seed=page)
            assert get_pages(rank, name, [key], here) == [True]
            same = flat(pool, page) == pages[known]
            assert same
        pool.allocator.restore(stored)
        assert set_pages(rank, name, keys[-1:], here) == [True]
        rank.close()
    assert len(places) == 1
    same = [page == pages[0] for page in pages]
    assert all(same)
    assert len(set(pages[0])) > 100  # not the zeros of a page that nobody filled


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_that_lie_otherwise_on_the_device_are_others(model, tmp_path, layout):
    """Host pages are copies of the device's, whatever the order of tokens in these."""
    url = f"nvme://{tmp_path}/store?capacity=64MiB"
    places = set()
    for device_layout in KVBufferLayout:
        pool = host_pools.mha(layout, device_layout=device_layout)
        rank = attach(url, model, pool)
        assert rank.batch_exists(hashes(2)) == 0
        assert rank.batch_set_v1(hashes(2), indices(pool, [0, 1])) == [True, True]
        places.update(rank._pools["kv"].places)
        rank.close()
    assert len(places) == len(KVBufferLayout)


class Registering(Wrapper):
    """A store over a network card: it wants to know the memory that pages lie in."""

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, registration=True)
        self.told = []

    def register_buffer(self, buffer):
        self.told.append(buffer)


@pytest.fixture
def registering(monkeypatch):
    """The stores that adapters open, each with the capability `registration`."""
    made, opened = [], registry.open
    monkeypatch.setattr(
        registry, "open", lambda *args: made.append(Registering(opened(*args))) or made[-1]
    )
    return made


@pytest.mark.parametrize("case", ["mha layer_first", "mla page_first", "indexer layer_first"])
def test_memory_that_pages_move_from_and_to_is_registered(registering, tmp_path, case):
    pool, pages = build(case)
    attach("memory://", make_model(tmp_path / "model"), pool).close()
    told = {(address(view), view.nbytes) for store in registering for view in store.told}
    wanted = {(at, view.nbytes) for at, view in getattr(pages, "regions", ())}
    assert told == wanted
    assert bool(wanted) == (case in IN_PLACE)


def test_a_pool_without_flat_pages_needs_the_calls_in_place(tmp_path):
    pool, model = host_pools.mha("page_first", v_head_dim=6), make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r'no flat pages.*"interface_v1": 1'):
        attach("memory://", model, pool, interface_v1=0)
    attach("memory://", model, pool).close()
