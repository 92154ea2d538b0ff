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


@pytest.mark.parametrize("seed", range(20))
def test_a_table_that_reports_often_says_what_one_does_that_reports_once(seed):
    """Each change shows in the next report, whatever the reports before said."""
    chance = random.Random(seed)
    config = Config(Topology(1), max_pages=1000)
    often, once = FactTable(config, 0, 1), FactTable(config, 0, 1)
    often.facts()
    open_tickets: list[int] = []
    done: dict[int, int] = {}
    for number in range(200):
        ticket = chance.choice(open_tickets) if open_tickets and number % 3 else number
        if ticket == number:
            rules = (("mamba", "trailing_pages"),) if chance.random() < 0.3 else ()
            span = Span(f"r{number}", 0, 0, 100, b"tail", rules)
            calls = [("open", (number, span)), ("hit", (number, 100, 1 if rules else None))]
            open_tickets.append(number)
            done[number] = 0
        elif chance.random() < 0.1:
            calls = [("finish", (ticket,)), ("settle", (ticket,)), ("close", (ticket,))]
            open_tickets.remove(ticket)
        else:
            done[ticket] = min(done[ticket] + 1, 100)
            calls = [("granted", (ticket, 100)), ("progress", (ticket, done[ticket]))]
            calls += [("enter", (ticket,)), ("leave", (ticket,))]
        for name, args in calls:
            for table in (often, once):
                getattr(table, name)(*args)
            said = often.facts()
    assert open_tickets
    both = once.facts()
    assert (said.rows, said.ends) == (both.rows, both.ends)
