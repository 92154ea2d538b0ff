"""Values refuse what makes no sense where they are made, and name the nearest that does."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.consensus.values import (
    ALL_ENDS,
    SIDECARS,
    UNLIMITED,
    Bounds,
    Config,
    Facts,
    Kind,
    Span,
    Topology,
)
from l3store.errors import ConfigError

NONSENSE = [-1, 0, True, 1.0, float("nan"), float("inf"), "1", None, [], 1 << 80]

# -- topology -------------------------------------------------------------------------------------


def test_sizes_that_do_not_multiply_are_refused():
    with pytest.raises(ConfigError, match=r"pp 2 x cp 1 x tp 3 is 6 ranks, and the group has 8"):
        Topology(8, pp=2, tp=3)


@pytest.mark.parametrize("name", ["ranks", "pp", "cp", "tp"])
@pytest.mark.parametrize("size", NONSENSE[:-1], ids=repr)
def test_a_size_is_a_whole_number_from_1(name, size):
    with pytest.raises(ConfigError, match=f"{name}="):
        Topology(**{"ranks": 1} | {name: size})


def test_tp_runs_fastest_and_rank_0_leads():
    topology = Topology(12, pp=2, cp=3, tp=2)
    seats = [topology.seat(rank) for rank in range(12)]
    assert seats == [(p, c, t) for p in range(2) for c in range(3) for t in range(2)]
    assert topology.name(9) == "rank 9 (pp 1, cp 1, tp 1)"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_its_group_is_refused(rank):
    with pytest.raises(ConfigError, match=r"not in a group of 2: 0 to 1"):
        Topology(2, tp=2).seat(rank)


# -- config ---------------------------------------------------------------------------------------

COUNTS = [
    "threshold_pages", "occupancy_pages", "max_pages", "max_late_pages", "batch_pages", "window",
]  # fmt: skip
SECONDS = [
    "deadline_s", "timeout_s", "timeout_page_s", "interval_s", "heartbeat_s", "peer_timeout_s",
]  # fmt: skip


def test_every_field_of_a_config_is_checked_here():
    """A new field must say what it refuses, and be given to the tests below."""
    known = {"topology", "schema", "policy", *COUNTS, *SECONDS}
    assert known == {each.name for each in fields(Config)}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_pages_and_records_are_whole_numbers_that_fit_on_the_wire(make, name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        make.config(**{name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [-0.001, *NONSENSE[2:3], *NONSENSE[4:]], ids=repr)
def test_times_are_finite_seconds(make, name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        make.config(**{name: value})


@pytest.mark.parametrize("name", ["schema", "policy"])
@pytest.mark.parametrize("value", [1, None, b"x", []], ids=repr)
def test_texts_are_texts(make, name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        make.config(**{name: value})


@pytest.mark.parametrize("value", ["tp2", None, 2, (2, 1, 1, 2)], ids=repr)
def test_a_topology_is_one(value):
    with pytest.raises(ConfigError, match="topology="):
        Config(value)


def test_an_unknown_policy_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'best-effort'; did you mean 'best_effort'\?"):
        Config(Topology(1), policy="best-effort")


def test_a_heartbeat_may_be_lost_before_a_rank_is(make):
    with pytest.raises(ConfigError, match=r"heartbeat_s=1 .* at most a third"):
        make.config(heartbeat_s=1.0, peer_timeout_s=2.9)
    assert make.config(heartbeat_s=1.0, peer_timeout_s=3.0).heartbeat_s == 1


@pytest.mark.parametrize("most", ["max_pages", "occupancy_pages"])
def test_a_threshold_that_no_ticket_can_reach_is_refused(most):
    with pytest.raises(ConfigError, match=f"threshold_pages=9 is above {most}=8"):
        Config(Topology(1), threshold_pages=9, **{most: 8})
    Config(Topology(1), threshold_pages=8, **{most: 8})


def test_an_interval_longer_than_the_heartbeat_is_refused(make):
    with pytest.raises(ConfigError, match=r"interval_s=0\.3 is longer than heartbeat_s=0\.2"):
        make.config(interval_s=0.3, heartbeat_s=0.2)


def test_what_ranks_compare_holds_every_field(make):
    plain = make.config(4).plain()
    assert plain.keys() == ({each.name for each in fields(Config)} - {"topology"}) | {
        "ranks", "pp", "cp", "tp"
    }  # fmt: skip
    assert (plain["ranks"], plain["tp"], plain["policy"]) == (4, 4, "best_effort")


# -- spans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "least"), [("attempt", 0), ("start", 0), ("pages", 1)])
@pytest.mark.parametrize("value", [-1, True, 1.0, float("nan"), "1", None], ids=repr)
def test_the_numbers_of_a_span_are_whole(make, name, least, value):
    with pytest.raises(ConfigError, match=rf"{name}=.* of request 'r': it is {least} or more"):
        make.replace(make.span(), **{name: value})


@pytest.mark.parametrize("fields", [{"rid": b"r"}, {"rid": 5}, {"tail_hash": "x"}], ids=repr)
def test_a_span_has_a_text_and_a_hash(make, fields):
    with pytest.raises(ConfigError, match="they are text and bytes"):
        make.replace(make.span(), **fields)


def test_an_unknown_rule_of_a_sidecar_is_refused_with_the_nearest_one(make):
    with pytest.raises(ConfigError, match=r"'mamba'; did you mean 'trailing_pages'\?"):
        make.span(sidecars=(("mamba", "trailing"),))


def test_a_pool_with_two_rules_is_refused(make):
    with pytest.raises(ConfigError, match="a pool has one rule"):
        make.span(sidecars=(("swa", "trailing_pages"), ("swa", "all_pages")))


def test_only_trailing_pages_limit_the_end_points(make):
    trailing = {rule: make.span(sidecars=(("p", rule),)).trailing for rule in SIDECARS}
    assert trailing == {"all_pages": False, "block_groups": False, "trailing_pages": True}


SIDE = st.dictionaries(st.text(max_size=3), st.sampled_from(SIDECARS), max_size=3)
SPANS = st.tuples(
    st.text(max_size=4), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3),
    st.binary(max_size=2), SIDE.map(lambda found: tuple(found.items())),
)  # fmt: skip


@given(SPANS, SPANS)
def test_spans_have_one_digest_exactly_if_they_are_one_span(one, other):
    same = (*one[:5], sorted(one[5])) == (*other[:5], sorted(other[5]))
    assert (Span(*one).digest == Span(*other).digest) == same


@given(SPANS)
def test_the_order_of_sidecars_does_not_count(fields):
    assert Span(*fields).digest == Span(*fields[:5], fields[5][::-1]).digest


def test_the_digest_is_the_same_in_every_process_and_version(make):
    """History 15: it is compared between ranks, so it is a literal here."""
    assert make.span().digest == 0x58A45EBA45A34016


def test_texts_of_a_span_are_framed_not_joined(make):
    assert make.span("a", tail=b"bc").digest != make.span("ab", tail=b"c").digest


def test_half_a_surrogate_pair_is_a_request_id(make):
    """JSON from a user can hold one; a rank must not die of it."""
    assert make.span("\udc80").digest != make.span("\udc81").digest


def test_a_span_cannot_be_changed_behind_its_digest(make):
    with pytest.raises(FrozenInstanceError):
        make.span().pages = 11


def test_a_label_is_the_request_and_its_attempt(make):
    assert make.span("r", 3).label == ("r", 3)


# -- the rest -------------------------------------------------------------------------------------


def test_device_streams_end_in_order_and_storage_calls_do_not():
    in_order = {kind: kind.in_order for kind in Kind}
    assert in_order == {Kind.WRITE_THROUGH: True, Kind.LOAD_BACK: True, Kind.BACKUP: False}


def test_what_nobody_has_said_is_0_for_use_and_unlimited_for_verdicts():
    """History 3: or every ticket were revoked at once."""
    assert Bounds() == (0, UNLIMITED, 0, UNLIMITED, 0, False, ALL_ENDS)


def test_a_rank_that_has_reached_nothing_has_a_place_for_each_kind():
    facts = Facts(1, 0, 1, 0)
    assert len(facts.acked) == len(facts.failed) == len(Kind)
