"""`L3StoreHiCache`: SGLang HiCache's storage backend over any store of L3Store.

Written against sglang 0.5.23; tests/sglang/test_drift.py compares what is overridden and called.

SGLang calls from four threads: main (registration, `clear`, `close`, `get_stats`), query
(`batch_exists*`: a whole chain in one call), read and write (`batch_get*`, `batch_set*`: at most
128 pages of the KV pool). All may be inside at once. The engine decides which rank writes what, and
ranks agree on hits and progress by its own MIN; each rank answers here for itself alone.

No data call raises: what goes wrong is a miss, or a page not stored, counted by reason
(`l3store.adapters.sglang.tally`). The engine uses its host pages again as soon as it is answered,
so no call of the store works on them any longer then: ``late=wait`` or ``late=staged``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

import l3store.registry
from l3store.adapters.sglang import another_version, options, prefixes, updates
from l3store.adapters.sglang.engine import look
from l3store.adapters.sglang.identity import groups_of, identify
from l3store.adapters.sglang.pools import InPlace, kind_of, pages_of
from l3store.adapters.sglang.tally import Tally
from l3store.adapters.sglang.traffic import Pool, Traffic
from l3store.config import StoreURL
from l3store.errors import ConfigError
from l3store.keys import attach, attach_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

__all__ = ["Cleared", "L3StoreHiCache"]

_KV = PoolName.KV.value
_DELETE_BATCH = 1000
_log = logging.getLogger("l3store.sglang")


class Cleared(NamedTuple):
    """What `L3StoreHiCache.clear` did."""

    removed: int
    """Pages of this rank's places that were removed."""
    left: int
    """Pages that were there when it ended: 0, but for what was stored meanwhile."""


class L3StoreHiCache(HiCacheStorage):
    """SGLang's L3 on the store that the extra config's ``url`` names."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        """Opens the store. Called on the scheduler's main thread, at attach; blocks.

        Args:
            storage_config: Ranks, model name and extra config of this rank.
            kwargs: What SGLang's factory passes on; empty in 0.5.23.

        Raises:
            ConfigError: An option is wrong, or pages of this engine cannot be told apart.
            BackendUnavailable: The store does not answer.
        """
        self._options = options.load(storage_config.extra_config)
        updates.watch()
        self._updates = updates.seen()
        with _the_version_known():
            self._engine = look(storage_config, self._options)
        at = self._engine.at
        self._rank = f"L3Store pp{at.pp} cp{at.cp} tp{at.tp}"  # SGLang's log names no logger
        self._tally = Tally(self._rank, self._options.log_interval)
        self._metered = storage_config.enable_storage_metrics
        self._pools: dict[str, Pool] = {}
        self._attached = False
        self._store = l3store.registry.open(self._options.url)
        scheme = StoreURL.parse(self._options.url).scheme
        self._traffic = Traffic(self._store, scheme, self._tally, self._why_off)
        if scheme == "memory":
            _log.warning("%s: memory:// is this process's own, and gone when it ends", self._rank)
        self._in_place = bool((storage_config.extra_config or {}).get("interface_v1"))
        if not self._in_place:
            _log.warning('%s: without "interface_v1": 1 each page is copied twice', self._rank)

    # -- attach and detach: the scheduler's main thread ---------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the anchor pool, which holds KV, and announces its places in the store. Blocks.

        Raises:
            ConfigError: Its pages cannot be told apart from others or moved, or the store holds
                another descriptor under the same name.
            BackendUnavailable: The store does not answer.
        """
        super().register_mem_pool_host(mem_pool_host)
        # Not in `on_host_pools_registered`: an error there leaves SGLang half attached.
        self._pools[_KV] = self._attach(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Takes one pool of a group of pools, as `register_mem_pool_host` does; KV comes again.

        Raises as that does; the store is closed then. A pool that SGLang adds later, while it
        serves, is told in the log instead, and never hits.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _word(host_pool_name)
        if name == _KV and host_pool is self.mem_pool_host:
            return
        try:
            self._pools[name] = self._attach(name, host_pool)
        except Exception as error:
            if not self._attached:
                self.close()
                raise
            _log.error("%s: pool %r stays without L3: %s", self._rank, name, error)

    def on_host_pools_registered(self) -> None:
        """Notes that all pools of the start are there."""
        self._attached = True

    def _attach(self, name: str, pool: Any) -> Pool:
        with _the_version_known():
            kind = kind_of(name, pool)
            pages = pages_of(name, pool, kind, groups_of(self._engine, name, pool, kind))
            if pages is None:
                return Pool(name, [], None)
            if name == _KV and not self._in_place:
                _check_flat(name, pool)
            anchor = self.mem_pool_host
            # A logical pool has only the one size.
            page_size = getattr(anchor, "logical_page_size", anchor.page_size)
            identity = identify(self._engine, self._options, name, pool, kind, pages, page_size)
        namespace = attach(self._store, identity.descriptor)
        places = [f"{namespace}/{name}/{shard}" for shard in identity.shards]
        for place, described in zip(places, identity.places, strict=True):
            attach_place(self._store, place, described)
        way = "copied"
        if isinstance(pages, InPlace):
            way = "in place"
            for _, memory in pages.regions if self._store.capabilities.registration else ():
                self._store.register_buffer(memory)
        _log.info("%s: pool %s (%s): %s", self._rank, name, way, ", ".join(places))
        return Pool(name, places, pages)

    def close(self) -> None:
        """Closes the store; later calls miss. Blocks for running calls; twice is a no-op."""
        self._tally.close()
        self._store.close()

    def clear(self) -> Cleared:
        """Removes all pages of this rank's places, also those that other engines stored there.

        Blocks; other places of the store are not touched.

        Raises:
            Exception: What the store said of a place that could not be cleared, after all others
                were tried. SGLang 0.5.23 logs it and goes on; its answer still says "cleared".
        """
        removed = left = 0
        problem: Exception | None = None
        for place in [place for pool in self._pools.values() for place in pool.places]:
            try:
                keys = list(self._store.scan(place))
                for at in range(0, len(keys), _DELETE_BATCH):
                    removed += sum(self._store.delete(keys[at : at + _DELETE_BATCH]))
                left += sum(1 for _ in self._store.scan(place))
            except Exception as error:
                _log.error("%s: %s could not be cleared: %s", self._rank, place, error)
                problem = error
        if problem is not None:
            raise problem
        _log.info("%s: cleared %d pages, %d are left", self._rank, removed, left)
        return Cleared(removed, left)

    def get_stats(self) -> StorageMetrics | None:
        """Returns pages and GB/s of each call since the last time; None without storage metrics."""
        if not self._metered:
            return None
        told = StorageMetrics()
        for speeds, pages, bandwidth in (
            (self._traffic.reads, told.prefetch_pgs, told.prefetch_bandwidth),
            (self._traffic.writes, told.backup_pgs, told.backup_bandwidth),
        ):
            while speeds:
                speed = speeds.popleft()
                pages.append(speed.pages)
                bandwidth.append(speed.gb_per_s)
        return told

    def outcomes(self) -> dict[tuple[str, str], int]:
        """Returns pages by (op, outcome) since attach; see `l3store.adapters.sglang.tally`."""
        return dict(self._tally.outcomes())

    def _why_off(self) -> str:
        if updates.seen() == self._updates:
            return ""
        return (
            "the engine's weights were updated: L3 is off until the storage backend is detached "
            "and attached again"
        )

    # -- queries: the query thread ---------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Returns whether the page is stored; False when the store cannot say."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Returns the leading run of `keys` that is stored; 0 when the store cannot say."""
        pool = self._pools.get(_KV)
        if pool is None or pool.pages is None:  # a logical pool alone proves nothing
            return 0
        return self._traffic.run(pool, keys)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Returns which prefixes of `keys` all pools together can restore.

        ``kv_hit_pages`` is the longest, ``restorable_prefix_pages`` all of them, ascending.
        ``extra_pool_hit_pages`` says of each pool, KV among them, how far it alone reaches: 0 when
        the store cannot say.
        """
        if not pool_transfers:
            run = self.batch_exists(keys)
            return PoolTransferResult(run, {_KV: run}, list(range(1, run + 1)))
        run = self._traffic.run(self._pools[_KV], keys) if _KV in self._pools else 0
        reach = {_KV: run}
        usable = set(range(1, run + 1))
        for transfer in pool_transfers:
            name = _word(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                reach[name] = self._block_groups(name, transfer, keys)
                continue
            present = self._each(name, keys[:run])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                legal = prefixes.trailing_pages(present, max(1, len(transfer.keys or ())))
            else:
                legal = prefixes.all_pages(present)
            reach[name] = max(legal, default=0)
            usable &= legal
        return PoolTransferResult(max(usable, default=0), reach, sorted(usable))

    def _block_groups(self, name: str, transfer: PoolTransfer, keys: Sequence[str]) -> int:
        block, group = transfer.block_pages, transfer.group_pages
        if not 1 <= group <= block:
            return 0
        asked = transfer.keys or prefixes.group_hashes(keys, block, group)
        return prefixes.block_groups(self._each(name, asked), block, group)

    def _each(self, name: str, hashes: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        return [False] * len(hashes) if pool is None else self._traffic.each(pool, hashes)

    # -- host pages: the read and the write thread ----------------------------------------------

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Fills KV host pages. One bool a key; the content of a False page is unspecified.

        Args:
            keys: Page hashes, 64 hexadecimal digits each.
            host_indices: Token indices, int64 on the CPU, ``len(keys) * page_size`` of them.
            extra_info: Of no use here.
        """
        return self._read(_KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Stores KV host pages; arguments as of `batch_get_v1`.

        ``extra_info.prefix_keys`` (with ``hicache_storage_pass_prefix_keys``) tells parent and
        depth, by which stores evict whole tails of chains and tools find what is unreachable.
        """
        return self._write(_KV, keys, host_indices, _before(extra_info))

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Fills host pages of several pools: a list of bool for each pool that was asked for."""
        return {
            _word(one.name): self._read(one.name, one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Stores host pages of several pools: a list of bool for each pool that was asked for."""
        before = _before(extra_info)
        return {
            _word(one.name): self._write(
                one.name,
                one.keys or [],
                one.host_indices,
                # Pools that hold some pages only have no parents to speak of.
                before if one.hit_policy == PoolHitPolicy.ALL_PAGES else None,
            )
            for one in transfers
        }

    def _read(
        self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        pool = self._pools.get(_word(name))
        return [False] * len(keys) if pool is None else self._traffic.read(pool, keys, host_indices)

    def _write(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        before: Sequence[str] | None,
    ) -> list[bool]:
        pool = self._pools.get(_word(name))
        if pool is None:
            return [False] * len(keys)
        return self._traffic.write(pool, keys, host_indices, before)

    # -- flat pages, without interface_v1 --------------------------------------------------------

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Returns `target_location` filled with the page, or None."""
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Fills flat KV pages; returns for each its tensor, or None.

        Args:
            keys: Page hashes.
            target_locations: A contiguous CPU tensor of one flat page a key.
            target_sizes: Of no use here.
        """
        pool = self._pools.get(_KV)
        if pool is None:
            return [None] * len(keys)
        into = [] if target_locations is None else target_locations
        good = self._traffic.read_flat(pool, keys, into)
        return [into[i] if ok else None for i, ok in enumerate(good)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores a flat KV page; returns whether it is stored."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores flat KV pages, consecutive ones of one chain; returns whether all are stored."""
        pool = self._pools.get(_KV)
        flat = [] if values is None else values
        return pool is not None and all(self._traffic.write_flat(pool, keys, flat))


@contextmanager
def _the_version_known() -> Iterator[None]:
    """Says of what is not there, or is called otherwise, that the version may be the reason."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise ConfigError(another_version(error)) from error


def _check_flat(name: str, pool: Any) -> None:
    try:
        pool.get_dummy_flat_data_page()
    except NotImplementedError as error:
        raise ConfigError(
            f'pool {name!r} has no flat pages, by which SGLang moves them without "interface_v1": '
            "1; add that to the extra config"
        ) from error


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
    return None if extra_info is None else extra_info.prefix_keys


def _word(name: PoolName | str) -> str:
    return str(getattr(name, "value", name))
