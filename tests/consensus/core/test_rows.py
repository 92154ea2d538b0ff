"""What is kept from report to report changes nothing of what a report says."""

from __future__ import annotations

import random

import pytest

from l3store.consensus.table import FactTable
from l3store.consensus.values import Config, Facts, Row, Span, Topology
from l3store.consensus.wire import Rows, decode_facts, encode_facts


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_known_from_the_report_before(seed):
    chance = random.Random(seed)
    rows: dict[int, Row] = {}
    kept = Rows()
    following = 0
    for seq in range(1, 60):
        for _ in range(chance.randint(0, 12)):
            rows[following] = Row(following, chance.getrandbits(60))
            following += 1
        for ticket in chance.sample(sorted(rows), min(len(rows), chance.randint(0, 9))):
            rows[ticket] = rows[ticket]._replace(done=rows[ticket].done + 1)
        for ticket in chance.sample(sorted(rows), min(len(rows), chance.choice([0, 0, 1, 20]))):
            del rows[ticket]
        facts = Facts(1, 1, seq, seq, rows=frozenset(rows.values()))
        data = encode_facts(facts)
        assert decode_facts(data, kept) == decode_facts(data) == facts


def test_rows_that_are_the_same_are_the_same_object():
    data = encode_facts(Facts(1, 1, 1, 1, rows=frozenset({Row(1, 2), Row(3, 4)})))
    kept = Rows()
    assert decode_facts(data, kept).rows is decode_facts(data, kept).rows


def life(ticket: int, chance: random.Random) -> list[tuple[str, tuple[object, ...]]]:
    """All that is said of one ticket, in its order."""
    rules = (("mamba", "trailing_pages"),) if chance.random() < 0.5 else ()
    begin = [("open", (ticket, Span(f"r{ticket}", 0, 0, 100, b"tail", rules)))]
    if chance.random() < 0.2:
        return [*begin, ("decline", (ticket,)), ("close", (ticket,))]
    calls = chance.random() < 0.5
    all_of_it = [
        *begin,
        ("hit", (ticket, 100, 6 if rules else None)),
        ("granted", (ticket, 100)),
        ("enter", (ticket,)),
        ("progress", (ticket, 40)),
        ("progress", (ticket, 70)),
        ("finish", (ticket,)),
        ("settle", (ticket,)),
        ("leave", (ticket,)),
        ("close", (ticket,)),
    ]
    return [call for call in all_of_it if calls or call[0] not in ("enter", "progress", "leave")]


@pytest.mark.parametrize("seed", range(8))
def test_each_change_of_a_table_is_in_its_next_report(seed):
    """A table that reports after each change says what one says that reports for the first time."""
    chance = random.Random(seed)
    config = Config(Topology(1), max_pages=1000)
    table = FactTable(config, 0, 1)
    told: list[tuple[str, tuple[object, ...]]] = []
    lives: list[list[tuple[str, tuple[object, ...]]]] = []
    while len(told) < 100:
        if len(lives) < 4:
            lives.append(life(sum(name == "open" for name, _ in told), chance))
            told.append(lives[-1].pop(0))
        else:
            one = chance.choice(lives)
            told.append(one.pop(0))
            if not one:
                lives.remove(one)
        name, args = told[-1]
        getattr(table, name)(*args)
        last, about = told[-1][0], told[-1][1][0]
        said = table.facts()
        own = [row for row in said.rows if row.ticket == about]
        assert len(own) == (last != "close")
        assert last != "decline" or own[0].quiet
        fresh = FactTable(config, 0, 1)
        for name, args in told:
            if name == "decline":
                fresh.facts()  # a row that was never said would be taken back
            getattr(fresh, name)(*args)
        once = fresh.facts()
        assert (said.rows, said.ends) == (once.rows, once.ends)
