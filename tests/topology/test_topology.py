"""L3Store's names have no alias and miss no share; other schemes are found out."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

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


def _places(model, tp, stages=(6, 6), pool="kv", **kinds):
    names = L3StoreNames()
    deployment = Deployment(model=model, tp_size=tp, stages=stages, **kinds)
    return {name for v in deployment.views() if v.pool == pool for name in names.names(v)}


def test_mla_pages_are_shared_by_all_tp_sizes_and_replicas_of_equal_pp():
    one = _places("mla-indexer", 1)
    assert one == _places("mla-indexer", 8) == _places("mla-indexer", 2, replicas=2)
    assert not one & _places("mla-indexer", 1, stages=(3, 3, 3, 3))


def test_mha_pages_are_shared_at_equal_tp_and_pp_only():
    assert _places("mha-8-heads", 2) == _places("mha-8-heads", 2, replicas=2)
    assert not _places("mha-8-heads", 2) & _places("mha-8-heads", 4)


def test_stages_cut_in_another_way_are_not_shared():
    """Stage 1 of 3 has four layers in both: 5 to 8 in one, 4 to 7 in the other."""
    for model in ("mha-8-heads", "mla-indexer"):
        assert not _places(model, 2, stages=(5, 4, 3)) & _places(model, 2, stages=(4, 4, 4))


def test_head_groups_are_shared_by_tp2_and_tp4():
    shared = [_places("mha-8-heads", tp, layout="page_head", head_groups=8) for tp in (1, 2, 4, 8)]
    assert shared[0] == shared[1] == shared[2] == shared[3]
    assert len(shared[0]) == 2 * 8


def test_a_tp_cut_sidecar_does_not_split_the_replicated_kv():
    assert _places("mla-mamba", 1) == _places("mla-mamba", 4)
    assert not _places("mla-mamba", 1, pool="mamba") & _places("mla-mamba", 4, pool="mamba")


def test_what_dcp_does_not_deal_is_shared_by_all_dcp_sizes():
    one, two = ({pool: _places("mla-indexer", 4, pool=pool, dcp_size=dcp)
                 for pool in ("kv", "indexer")} for dcp in (1, 2))  # fmt: skip
    assert one["indexer"] == two["indexer"]
    assert not one["kv"] & two["kv"]


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


def test_contents_are_worked_out_from_the_model():
    """By hand: what stands at a few ranks."""
    views = list(Deployment(model="gqa-2-heads", stages=(5, 4, 3), tp_size=8, dcp_size=2).views())
    (content,) = next(v for v in views if (v.pp, v.tp) == (1, 5)).contents()
    assert content.layers == ("5", "6", "7", "8")
    assert content.heads == (1,)  # 8 ranks, 2 heads: ranks 4 to 7 repeat head 1
    assert content.positions == (0, 1, 1, 2)  # rank 5 is dcp 1 of 2
    last = Deployment(model="hybrid-draft", stages=(6, 6), cp_size=2).views()
    kv = next(v for v in last if (v.pp, v.cp, v.pool) == (1, 1, "kv"))
    assert kv.contents()[0].layers == ("6", "9", "draft 0")
    assert kv.contents()[0].positions == (1, 2, 0, 1)
    groups = Deployment(model="mha-8-heads", tp_size=4, layout="page_head", head_groups=8).views()
    assert [c.heads for c in list(groups)[3].contents()] == [(6,), (7,)]


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


class WithoutStages(Bad):
    """Part and size of the pipeline only: another cut of the stages has other layers."""

    def names(self, v):
        return super().names(replace(v, stages=(1,) * v.pp_size))


class WithoutWeights(Bad):
    def names(self, v):
        return super().names(replace(v, weights_revision="any"))


class WithoutDraft(Bad):
    def names(self, v):
        return super().names(replace(v, draft_revision=None))


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


class TheEnginesFirstRankWrites(Bad):
    """A TP rank counted over the CP ranks: nobody writes what replicated pools of cp 1 hold."""

    fault = "writers"

    def writes(self, v):
        return v.cut == "tp" or v.engine_tp < v.dcp_size


def _telling(d):
    """A few deployments in which every fault shows: bytes on one stage, ranks in one layout."""
    if d.stages == (12,) and d.cp_size == d.dcp_size == 1:
        return d.tp_size <= 2 and (d.page_size == 64 or d.model == "gqa-2-heads")
    plain = d.layout == "layer_first" and d.page_size == 64 and d.dtype == "bfloat16"
    return plain and d.stages in ((5, 4, 3), (4, 4, 4)) and d.tp_size in (1, 4)


FEW = [d for d in deployments() if _telling(d)]


@pytest.mark.parametrize("scheme", Bad.__subclasses__())
def test_a_bad_scheme_is_found_out(scheme):
    report = check_naming(scheme(), FEW)
    faults = getattr(report, scheme.fault)
    assert faults, str(report)
    assert not report.good
    assert f"{len(faults)} " in str(report)
    assert 0 < len(faults.examples) <= len(faults)
    assert faults.examples[0] in str(report)


@pytest.mark.parametrize("part", ["P", "C", "T", "G", "D"])
def test_no_part_of_the_shard_is_idle(part):
    """Left out of the names, each gives several contents one name."""

    class Without(L3StoreNames):
        def names(self, v):
            return [re.sub(rf"(?<=[/-]){part}[0-9]+of[0-9]+", "", n) for n in super().names(v)]

    assert check_naming(Without(), FEW).aliases


def test_a_scheme_that_names_too_few_objects_is_told():
    class OneName(L3StoreNames):
        def names(self, v):
            return super().names(v)[:1]

    grouped = [d for d in FEW if d.head_groups and d.tp_size == 2]
    assert "1 names for 4 objects" in str(check_naming(OneName(), grouped))


def test_an_alias_is_told_by_what_differs():
    pair = [Deployment(model="mha-8-heads", stages=stages) for stages in ((5, 4, 3), (4, 4, 4))]
    (told,) = check_naming(WithoutStages(), pair).aliases.examples
    assert told.endswith("P1of3: layers ('5', '6', '7', '8') and ('4', '5', '6', '7')")
