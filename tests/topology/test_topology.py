"""L3Store's names have no alias and miss no share; other schemes are found out."""

from __future__ import annotations

import itertools

import pytest

from l3store.testing.topology import BYTE_ORDER, Deployment, L3StoreNames, check_naming, deployments


@pytest.fixture(scope="module")
def report():
    return check_naming(L3StoreNames())


def test_no_two_contents_share_a_name(report, capsys):
    with capsys.disabled():
        print(f"\ntopology: {report.instances} rank instances, {report.places} names, "
              f"{len(report.aliases)} aliases")  # fmt: skip
    assert not report.aliases, str(report)
    assert report.instances > 125_658


def test_what_must_be_shared_is(report):
    assert not report.missed, str(report)


def test_every_object_has_exactly_one_writer(report):
    assert not report.writers, str(report)


def _places(model, tp, pp=2, layout="layer_first", dp=1, groups=0, pool="kv", dtype="bfloat16"):
    names = L3StoreNames()
    deployment = Deployment(model, layout, dtype, 64, pp, 1, tp, 1, dp, groups)
    return {name for v in deployment.views() if v.pool == pool for name in names.names(v)}


def test_mla_pages_are_shared_by_all_tp_sizes_and_replicas_of_equal_pp():
    assert _places("mla-indexer", 1) == _places("mla-indexer", 8) == _places("mla-indexer", 2, dp=2)
    assert not _places("mla-indexer", 4, pp=2) & _places("mla-indexer", 4, pp=4)


def test_mha_pages_are_shared_at_equal_tp_and_pp_only():
    assert _places("mha-8-heads", 2) == _places("mha-8-heads", 2, dp=2)
    assert not _places("mha-8-heads", 2) & _places("mha-8-heads", 4)


def test_head_groups_are_shared_by_tp2_and_tp4():
    shared = [_places("mha-8-heads", tp, layout="page_head", groups=8) for tp in (1, 2, 4, 8)]
    assert shared[0] == shared[1] == shared[2] == shared[3]
    assert len(shared[0]) == 2 * 8


def test_a_tp_cut_sidecar_does_not_split_the_replicated_kv():
    assert _places("mla-mamba", 1) == _places("mla-mamba", 4)
    assert not _places("mla-mamba", 1, pool="mamba") & _places("mla-mamba", 4, pool="mamba")


def test_layouts_of_one_byte_order_share_and_others_do_not():
    for one, two in itertools.combinations(BYTE_ORDER, 2):
        same = BYTE_ORDER[one] == BYTE_ORDER[two]
        assert (
            _places("mha-8-heads", 2, layout=one) == _places("mha-8-heads", 2, layout=two)
        ) is same


def test_the_two_fp8_kinds_never_meet():
    kinds = ("fp8_e4m3", "fp8_e5m2", "bfloat16")
    for one, two in itertools.combinations(kinds, 2):
        assert not _places("mha-8-heads", 2, dtype=one) & _places("mha-8-heads", 2, dtype=two)


class Bad(L3StoreNames):
    """A scheme with a fault; `fault` is where the report must show it."""

    fault = "aliases"


class ModelAndTpRank(Bad):
    """Pipeline stages overwrite each other."""

    def names(self, v):
        return [f"{v.model}_{v.tp_size}_{v.tp}"] * max(v.head_groups // v.tp_size, 1)


class LayerAndHeadRange(Bad):
    """As an adapter sees them: every stage says layers 0-4, and repeated heads all say 0."""

    def names(self, v):
        first = v.tp * v.heads
        base = f"{v.model}-{v.pool}-{v.logical_dtype}-{v.layout}-{v.page_size}"
        each = max(v.head_groups // v.tp_size, 1)
        return [f"{base}-L0-{v.layers}-H{first}-{first + v.heads}-{i}" for i in range(each)]


class PoolDtype(Bad):
    """The pool's dtype: uint8 for both fp8 kinds."""

    def names(self, v):
        return [f"{v.pool_dtype}{n.partition('/')[2]}{v.model}{v.layers}{v.object_bytes}{v.layout}"
                f"{v.page_size}" for n in super().names(v)]  # fmt: skip


class WithoutShard(Bad):
    def names(self, v):
        return [name.rpartition("/")[0] for name in super().names(v)]


class WithoutPageSizeAndLayout(Bad):
    def names(self, v):
        return [f"{v.model}{v.logical_dtype}{n.partition('/')[2]}" for n in super().names(v)]


class HashOnly(Bad):
    def names(self, v):
        return [""] * len(super().names(v))


class ReplicaInTheName(Bad):
    fault = "missed"

    def names(self, v):
        return [f"{name}-dp{v.dp}" for name in super().names(v)]


class LayoutInTheName(Bad):
    fault = "missed"

    def names(self, v):
        return [f"{name}-{v.layout}" for name in super().names(v)]


class TpInEveryShard(Bad):
    """Rank and size also where TP does not cut: no sharing of MLA pages."""

    fault = "missed"

    def names(self, v):
        return [f"{name}-{v.tp}of{v.tp_size}" for name in super().names(v)]


class EveryRankWrites(Bad):
    fault = "writers"

    def writes(self, v):
        return True


class OnlyTheFirstRankWrites(Bad):
    fault = "writers"

    def writes(self, v):
        return v.tp == 0


FEW = [d for d in deployments() if d.page_size == 64 or d.model == "gqa-2-heads"]


@pytest.mark.parametrize("scheme", Bad.__subclasses__())
def test_a_bad_scheme_is_found_out(scheme):
    few = [d for d in FEW if d.tp_size <= 4 and d.pp_size in (1, 3)]
    report = check_naming(scheme(), few)
    assert getattr(report, scheme.fault), str(report)
    assert not report.good
    assert "instances" in str(report)
