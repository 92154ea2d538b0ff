"""Which pages two engines exchange over one store: the same bytes always, other bytes never."""

from __future__ import annotations

import hashlib
from array import array

import pytest
import torch
from hicache_rank import Geometry, differing, l3store, make_model, tokens
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE
from stored import headers, nvme

from l3store import keys, registry
from l3store.keys import FIRST_PAGE

PROMPT = tokens(20)
SHARED = {
    "MHA layer_first": Geometry(layout="layer_first"),
    "MHA page_first": Geometry(layout="page_first"),
    "MHA page_first_direct": Geometry(layout="page_first_direct"),
    "MHA page_head": Geometry(layout="page_head"),
    "MLA layer_first": Geometry(mla=True, layout="layer_first"),
    "MLA page_first": Geometry(mla=True, layout="page_first"),
    "MLA page_first_direct": Geometry(mla=True, layout="page_first_direct"),
}
SMOKE = {"MHA layer_first", "MHA page_head", "MLA layer_first"}


@pytest.fixture
def url(tmp_path):
    return nvme(tmp_path / "store")


def write(rank, prompt=PROMPT, seed=0):
    written = rank.insert(prompt, seed=seed)
    rank.backup()
    return written


def read(rank, prompt=PROMPT):
    """Returns what of a prompt comes back from the store, by layer."""
    loaded = rank.prefetch(prompt)
    back = rank.load_back(prompt)
    assert {len(rows) for rows in back.values()} == {loaded}
    return back


def read_nothing(rank):
    return rank.prefetch(PROMPT) == 0 and all(len(rows) == 0 for rows in rank.held(PROMPT).values())


def test_the_store_says_what_each_place_holds(new_rank, url):
    write(new_rank(l3store(url), geometry=Geometry(layout="page_first")))
    with registry.open(url) as store:
        (place,) = [name for name in store.list_meta() if "/" in name]
        held = keys.decode_meta(place, store.get_meta(place))
        descriptor = keys.decode_meta(place.split("/")[0], store.get_meta(place.split("/")[0]))
    assert (held.layer_start, held.layer_end) == (0, descriptor.layers)
    assert (held.head_start, held.head_end) == (0, descriptor.heads)
    assert len(held.segments) == 2  # K and V
    assert sum(held.segments) == descriptor.page_bytes


class TestShared:
    @pytest.mark.parametrize("first", ["v1", "generic"])
    @pytest.mark.parametrize(
        "geometry",
        [pytest.param(g, marks=() if g in SMOKE else pytest.mark.soak) for g in SHARED],
    )
    def test_zero_copy_and_generic_write_the_same_pages(self, new_rank, url, geometry, first):
        other = {"v1": "generic", "generic": "v1"}[first]
        one = new_rank(l3store(url, v1=first == "v1"), geometry=SHARED[geometry])
        written = write(one)
        one.close()
        another = new_rank(l3store(url, v1=other == "v1"), geometry=SHARED[geometry])
        assert differing(read(another), written) == []

    @pytest.mark.parametrize("first", ["layer_first", "page_first_direct"])
    @pytest.mark.parametrize("mla", [False, True], ids=["MHA", "MLA"])
    def test_layer_first_and_page_first_direct_are_the_same_bytes(self, new_rank, url, mla, first):
        other = {"layer_first": "page_first_direct", "page_first_direct": "layer_first"}[first]
        written = write(new_rank(l3store(url), geometry=Geometry(mla=mla, layout=first)))
        another = new_rank(l3store(url), geometry=Geometry(mla=mla, layout=other))
        assert differing(read(another), written) == []

    def test_a_second_controller_reads_what_the_first_wrote_while_both_are_open(
        self, new_rank, url
    ):
        first, second = new_rank(l3store(url)), new_rank(l3store(url))
        written = write(first)
        assert differing(read(second), written) == []
        more = tokens(8, seed=1)
        written = write(second, more)
        assert differing(read(first, more), written) == []


OTHER = {
    "layout": {"geometry": Geometry(layout="layer_first")},
    "heads first": {"geometry": Geometry(layout="page_head")},
    "dtype of one width": {"geometry": Geometry(dtype=torch.float16)},
    "dtype of another width": {"geometry": Geometry(dtype=torch.float32)},
    "heads": {"geometry": Geometry(heads=4)},
    "page size": {"geometry": Geometry(page_size=32)},
    "class of pool": {"geometry": Geometry(mla=True)},
    "tag": {"extra": {"tag": "elsewhere"}},
    "weights": {"extra": {"weights_revision": "of another day"}},
}


class TestApart:
    """A reader that differs in one thing misses plainly, and leaves what is stored as it is."""

    @pytest.mark.parametrize("what", OTHER)
    def test_another_is_a_plain_miss(self, new_rank, url, what):
        writer = new_rank(l3store(url))
        written = write(writer)
        held = headers(url)
        differs = OTHER[what]
        stranger = new_rank(
            l3store(url, **differs.get("extra", {})), geometry=differs.get("geometry", Geometry())
        )
        assert read_nothing(stranger)
        assert headers(url) == held
        # And now both have pages of the same hashes, each its own.
        theirs = write(stranger, seed=1)
        stranger.wipe()
        assert differing(read(stranger), theirs) == []
        writer.wipe()
        assert differing(read(writer), written) == []

    def test_another_model_under_the_same_name_is_a_plain_miss(self, new_rank, url, tmp_path):
        written = write(new_rank(l3store(url)))
        same, other = make_model(tmp_path / "same"), make_model(tmp_path / "other")
        (other / "model.safetensors").write_bytes(bytes(1 << 14))
        assert read_nothing(new_rank(l3store(url), model=other))
        assert differing(read(new_rank(l3store(url), model=same)), written) == []

    def test_both_fp8_kinds_are_bytes_to_the_pool_and_apart_in_the_store(self, new_rank, url):
        kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
        ranks = {
            name: new_rank(l3store(url, dtype=name), geometry=Geometry(dtype=dtype))
            for name, dtype in kinds.items()
        }
        assert {rank.host.dtype for rank in ranks.values()} == {torch.uint8}
        written = write(ranks["fp8_e4m3"])
        assert read_nothing(ranks["fp8_e5m2"])
        ranks["fp8_e4m3"].wipe()
        assert differing(read(ranks["fp8_e4m3"]), written) == []


class TestParents:
    """What stored headers say of the chain, for tools and eviction."""

    def chain(self, prompt=PROMPT):
        """The page hashes as sglang makes them: SHA-256 over the hash before and the tokens."""
        before, found = b"", []
        for i in range(0, len(prompt), 16):
            before = hashlib.sha256(before + array("I", prompt[i : i + 16]).tobytes()).digest()
            found.append(before)
        return found

    def links(self, url):
        """Depth, parent and hash of each stored page."""
        return {(h.depth, h.parent, h.page_hash) for h in headers(url).values()}

    def test_they_are_known_across_backups_of_one_prefix(self, new_rank, url):
        rank = new_rank(l3store(url))
        write(rank, PROMPT[: 7 * 16])
        write(rank)
        hashes = self.chain()
        parents = [FIRST_PAGE, *hashes]
        assert self.links(url) == set(zip(range(20), parents, hashes, strict=False))

    def test_they_are_known_across_the_batches_of_one_backup(self, new_rank, url):
        assert STORAGE_BATCH_SIZE < 150
        rank, prompt = new_rank(l3store(url), pages=160), tokens(150)
        write(rank, prompt)
        hashes = self.chain(prompt)
        parents = [FIRST_PAGE, *hashes]
        assert self.links(url) == set(zip(range(150), parents, hashes, strict=False))

    @pytest.mark.parametrize(
        "options", [{"parents": False}, {"v1": False}], ids=["not passed on", "generic"]
    )
    def test_where_the_engine_does_not_tell_the_first_of_a_backup_is_a_root(
        self, new_rank, url, options
    ):
        rank = new_rank(l3store(url, **options))
        write(rank, PROMPT[: 7 * 16])
        write(rank)
        hashes = self.chain()
        parents = [None, *hashes]
        parents[7] = None
        assert self.links(url) == {
            (None, parent, page_hash) for parent, page_hash in zip(parents, hashes, strict=False)
        }
