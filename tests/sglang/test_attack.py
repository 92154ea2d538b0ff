"""What an attacker of the adapter found, or found unguarded."""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace

import host_pools
import pytest
import torch
from attached import attach, hashes, indices, register
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from l3store import page, registry
from l3store.adapters.sglang import hicache, traffic, updates
from l3store.adapters.sglang.pools import InPlace, bytes_of, kind_of, pages_of
from l3store.config import StackOptions
from l3store.errors import BackendUnavailable, ConfigError
from l3store.wrap._base import Wrapper


class Cut(Wrapper):
    """A store whose connection is lost after the first page, when a test says so."""

    lost = False

    def page_set(self, keys, pages):
        if not self.lost:
            return self.inner.page_set(keys, pages)
        done = self.inner.page_set(keys[:1], pages[:1])
        raise BackendUnavailable("cut", done=done + [False] * (len(keys) - 1))

    def scan(self, place=None):
        if self.lost:
            raise BackendUnavailable("gone")
        return self.inner.scan(place)


@pytest.fixture
def one(model, monkeypatch):
    """Returns (pool, adapter, store), with nothing in the store yet."""
    store = Cut(registry.open("memory://?capacity=64MiB", raw=True))
    monkeypatch.setattr(
        registry, "open", lambda url: registry.stack(store, StackOptions(), name="memory")
    )
    pool = host_pools.mha()
    pool.allocator.fill(seed=1)
    rank = attach("memory://", model, pool)
    yield pool, rank, store
    rank.close()


def test_each_direction_has_its_own_speeds(model):
    pool = host_pools.mha()
    rank = attach("memory://", model, pool, ranks={"enable_storage_metrics": True})
    quiet = attach("memory://", model, pool)
    try:
        for one in (rank, quiet):
            assert all(one.batch_set_v1(hashes(3), indices(pool, [1, 2, 3])))
            assert all(one.batch_get_v1(hashes(2), indices(pool, [1, 2])))
        told = rank.get_stats()
        assert (told.prefetch_pgs, told.backup_pgs) == ([2], [3])
        assert len(told.prefetch_bandwidth) == len(told.backup_bandwidth) == 1
        assert min(told.prefetch_bandwidth + told.backup_bandwidth) > 0
        assert rank.get_stats().backup_pgs == []
        assert quiet.get_stats() is None
    finally:
        rank.close()
        quiet.close()


def test_what_was_stored_before_an_error_counts(one):
    pool, rank, store = one
    store.lost = True
    assert rank.batch_set_v1(hashes(3), indices(pool, [1, 2, 3])) == [True, False, False]
    assert rank.outcomes() == {("set", "stored"): 1, ("set", "unavailable"): 2}
    assert rank.batch_exists(hashes(3)) == 1


def test_a_page_for_which_there_is_no_room_is_told_as_that(one, monkeypatch):
    pool, rank, store = one
    whole = store.page_set
    monkeypatch.setattr(store, "page_set", lambda keys, pages: [*whole(keys[:2], pages[:2]), False])
    assert rank.batch_set_v1(hashes(3), indices(pool, [1, 2, 3])) == [True, True, False]
    assert rank.outcomes() == {("set", "stored"): 2, ("set", "full"): 1}


def test_no_sidecar_is_asked_about_a_prefix_that_kv_has_not(one, monkeypatch):
    """Each question may take a whole deadline while the store hangs."""
    _, rank, store = one
    asked = []
    monkeypatch.setattr(store, "exists_each", lambda keys: asked.append(keys) or [True] * len(keys))
    register(rank, {"mamba": host_pools.mamba_states()})
    assert rank.batch_exists_v2(hashes(3), [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 0
    assert asked == []


def test_closing_tells_what_was_counted_since_the_last_summary(one, caplog):
    pool, rank, _ = one
    assert all(rank.batch_set_v1(hashes(2), indices(pool, [1, 2])))
    with caplog.at_level("INFO", "l3store.sglang"):
        rank.close()
    assert "set stored 2" in caplog.text


def test_clear_takes_more_pages_than_one_call_deletes(one, monkeypatch):
    pool, rank, store = one
    monkeypatch.setattr(hicache, "_DELETE_BATCH", 2)
    assert all(rank.batch_set_v1(hashes(5), indices(pool, [1, 2, 3, 4, 5])))
    assert tuple(rank.clear()) == (5, 0)
    assert list(store.inner.scan()) == []


class TestFlatPagesAfterAnUpdateOfTheWeights:
    """Without interface_v1 a page that was found before must not be read after, nor be stored."""

    @pytest.fixture(autouse=True)
    def _before_any_update(self, monkeypatch):
        monkeypatch.setattr(updates, "_count", 0)
        monkeypatch.setattr(updates, "_unnamed", False)

    def _update(self):
        SchedulerWeightUpdaterManager.record_weight_version_after_update(
            SimpleNamespace(
                scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None)
            ),
            None,
        )

    def test_they_are_not_read(self, one):
        pool, rank, _ = one
        assert rank.batch_set_v1(hashes(2), indices(pool, [1, 2])) == [True, True]
        self._update()
        into = [pool.get_dummy_flat_data_page() for _ in range(2)]
        assert rank.batch_get(hashes(2), into) == [None, None]

    def test_they_are_not_stored(self, one):
        pool, rank, store = one
        self._update()
        assert not rank.batch_set(hashes(2), [pool.get_data_page(0), pool.get_data_page(4)])
        assert list(store.inner.scan()) == []


def test_clear_tells_what_is_there_when_it_ends(one, monkeypatch):
    """A backup that ran meanwhile, or a page that could not be removed."""
    pool, rank, store = one
    assert all(rank.batch_set_v1(hashes(3), indices(pool, [1, 2, 3])))
    whole = store.delete
    monkeypatch.setattr(
        store, "delete", lambda keys, headers=None: [*whole(keys[:1]), *[False] * (len(keys) - 1)]
    )
    assert tuple(rank.clear()) == (1, 2)


def test_an_attach_that_a_sidecar_fails_leaves_no_store_open(model, monkeypatch):
    opened = []
    whole = registry.open
    monkeypatch.setattr(registry, "open", lambda url: opened.append(whole(url)) or opened[-1])
    with pytest.raises(ConfigError, match="page_unified"):
        attach("memory://", model, host_pools.mha(), {"swa": host_pools.mha("page_unified")})
    with pytest.raises(BackendUnavailable, match="closed"):
        opened[0].list_meta()


class TestFlatPages:
    def test_a_backup_of_which_a_page_is_missing_is_none(self, one):
        pool, rank, store = one
        store.lost = True
        flats = [pool.get_data_page(n * pool.page_size) for n in (1, 2)]
        assert rank.batch_set(hashes(2), flats) is False
        assert rank.batch_exists(hashes(2)) == 1

    def test_no_error_of_the_store_reaches_the_engine(self, one, monkeypatch):
        pool, rank, store = one
        flat = pool.get_data_page(0)

        def odd(*args):
            raise OSError("what the store never should")

        monkeypatch.setattr(store, "page_get", odd)
        monkeypatch.setattr(store, "page_set", odd)
        assert rank.batch_get(hashes(2), [flat.clone(), flat.clone()]) == [None, None]
        assert rank.batch_set(hashes(2), [flat, flat]) is False
        assert rank.outcomes() == {("get", "refused"): 2, ("set", "refused"): 2}

    def test_a_tensor_that_would_be_read_into_a_copy_is_refused(self, one):
        pool, rank, _ = one
        assert rank.batch_set_v1(hashes(1), indices(pool, [1])) == [True]
        size = pool.get_dummy_flat_data_page().numel()
        spread = torch.zeros(size, 2, dtype=pool.dtype)[:, 0]
        assert rank.batch_get(hashes(1), [spread]) == [None]
        assert rank.outcomes()["get", "refused"] == 1

    def test_one_tensor_for_two_pages_is_refused(self, one):
        pool, rank, store = one
        assert all(rank.batch_set_v1(hashes(2), indices(pool, [1, 2])))
        assert rank.batch_get(hashes(2), [pool.get_dummy_flat_data_page()] * 2) == [None, None]
        assert len(list(store.inner.scan())) == 2

    def test_rows_of_one_tensor_are_pages(self, one):
        pool, rank, _ = one
        rows = torch.stack([pool.get_data_page(n * pool.page_size) for n in (1, 2)])
        assert rank.batch_set(hashes(2), rows)
        into = torch.zeros_like(rows)
        assert [page is not None for page in rank.batch_get(hashes(2), into)] == [True, True]
        assert torch.equal(into.view(torch.uint8), rows.view(torch.uint8))

    def test_a_page_of_another_length_is_refused(self, one):
        pool, rank, _ = one
        flat = pool.get_data_page(0)
        assert rank.batch_set(hashes(1), [flat[:-1]]) is False
        assert rank.batch_set(hashes(1), [torch.cat([flat, flat])]) is False
        assert rank.batch_exists(hashes(1)) == 0


@pytest.mark.parametrize("late", ["wait", "staged"])
def test_two_pages_are_not_read_into_one_host_page(model, tmp_path, late):
    """Both were called good with ``staged``; a reader that checks in place took one for damaged."""
    pool = host_pools.mha()
    pool.allocator.fill(seed=1)
    rank = attach(f"file://{tmp_path}/store?late={late}", model, pool)
    try:
        assert all(rank.batch_set_v1(hashes(3), indices(pool, [1, 2, 3])))
        before = pool.allocator.copy()
        assert rank.batch_get_v1(hashes(3), indices(pool, [4, 5, 4])) == [False] * 3
        assert pool.allocator.equals(before)
        assert rank.batch_exists(hashes(3)) == 3
    finally:
        rank.close()


def test_each_group_of_heads_is_read_into_its_own(model):
    pool = host_pools.mha("page_head", heads=4)
    pool.allocator.fill(seed=3)
    rank = attach("memory://", model, pool, ranks={"tp_lcm_size": 4})
    try:
        assert rank.batch_set_v1(hashes(2), indices(pool, [1, 2])) == [True, True]
        assert rank.batch_get_v1(hashes(2), indices(pool, [5, 4])) == [True, True]
        stored = [bytes(bytes_of(pool.get_data_page(n * pool.page_size))) for n in (1, 2)]
        read = [bytes(bytes_of(pool.get_data_page(n * pool.page_size))) for n in (5, 4)]
        assert [a == b for a, b in zip(stored, read, strict=True)] == [True, True]
    finally:
        rank.close()


class TestPagesOfSeveralObjects:
    """With head groups a page is four objects here: what is told of it is told once."""

    @pytest.fixture
    def grouped(self, model, monkeypatch):
        store = registry.open("memory://?capacity=64MiB", raw=True)
        monkeypatch.setattr(
            registry, "open", lambda url: registry.stack(store, StackOptions(), name="memory")
        )
        pool = host_pools.mha("page_head", heads=4)
        pool.allocator.fill(seed=3)
        ranks = {"tp_lcm_size": 4, "enable_storage_metrics": True}
        rank = attach("memory://", model, pool, ranks=ranks)
        yield pool, rank, store
        rank.close()

    def test_damage_to_all_of_them_is_one_page(self, grouped):
        pool, rank, store = grouped
        assert all(rank.batch_set_v1(hashes(2), indices(pool, [1, 2])))
        keys = list(store.scan())
        assert len(keys) == 8
        headers = store.headers(keys)
        zeroed = [
            (memoryview(header), memoryview(bytes(page.parse(header).payload_bytes)))
            for header in headers
        ]
        assert all(store.delete(keys))
        assert all(store.page_set(keys, zeroed))
        assert rank.batch_get_v1(hashes(2), indices(pool, [1, 2])) == [False, False]
        assert rank.outcomes() == {("set", "stored"): 2, ("get", "integrity"): 2}

    def test_the_speed_is_that_of_all_of_them(self, grouped, monkeypatch):
        pool, rank, _ = grouped
        seconds = SimpleNamespace(perf_counter=count().__next__)
        monkeypatch.setattr(traffic, "time", seconds)
        assert all(rank.batch_set_v1(hashes(2), indices(pool, [1, 2])))
        size = 2 * bytes_of(pool.get_data_page(0)).nbytes
        assert rank.get_stats().backup_bandwidth == [pytest.approx(size / 1e9)]


def test_pages_that_overlap_are_refused():
    class Odd:
        page_size, size = host_pools.PAGE_SIZE, host_pools.PAGES * host_pools.PAGE_SIZE
        pool = host_pools.mha("page_first")

        def get_page_buffer_meta(self, host_indices):
            pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
            return pointers, [2 * size for size in sizes]

    with pytest.raises(ConfigError, match="addresses of a Odd are not affine"):
        InPlace(Odd(), kind_of("kv", Odd.pool))


POOLS = {
    "mha": host_pools.mha,
    "mla": host_pools.mla,
    "mamba": host_pools.mamba_states,
    "indexer": host_pools.indexer,
    "deepseek_v4_c4": host_pools.v4_pages,
    "deepseek_v4_c4_state": host_pools.v4_states,
}


@pytest.mark.parametrize("name", POOLS)
def test_memory_outlives_what_sglang_does_at_exit(name):
    """sglang drops a pool's buffers (`destroy`) while its read and write threads still run."""
    pool = POOLS[name]()
    pool.allocator.fill(seed=2)
    pages = pages_of(name, pool, kind_of(name, pool))
    assert isinstance(pages, InPlace)
    before = b"".join(pages.framed([3])[0][1:])
    pool.allocator._raw.clear()
    pool.destroy()
    gc.collect()
    for start, region in pages.regions:
        assert any(
            base <= start and start + region.nbytes <= base + size
            for base, size in _storages(vars(pages))
        ), "the memory may be freed"
    assert b"".join(pages.framed([3])[0][1:]) == before


def _tensors(found):
    for value in found.values() if isinstance(found, dict) else found:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and not isinstance(value, str):
            yield from _tensors(value)


def _storages(found):
    for tensor in _tensors(found):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


def test_a_store_that_cannot_be_cleared_is_not_told_to_be_empty(one):
    pool, rank, store = one
    rank.batch_set_v1(hashes(2), indices(pool, [1, 2]))
    store.lost = True
    with pytest.raises(BackendUnavailable, match="gone"):
        rank.clear()
    store.lost = False
    assert tuple(rank.clear()) == (2, 0)
