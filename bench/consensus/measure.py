"""Bouts of all kinds in turn, and the figures of what their ranks saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from figures import Figure, Goal
from group import Group
from rank import Bout, Proof, Seen
from sides import CARRIED, COLLECTIVE, INTERVAL_S, RULER, SIDES, WINDOW_1, WINDOW_8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["RANKS", "Setting", "measure"]

RANKS = (2, 4)
TICKETS = (1, 64)
_OF_ALL_REDUCE = {2: 1 / 3, 4: 1 / 10}
_PYTHON_US = 100.0
_VOTES = ("hits", "progress", "state")
_IDLE = (WINDOW_8, CARRIED, COLLECTIVE)
_TIMED = (RULER, WINDOW_8, WINDOW_1, COLLECTIVE)


class Setting(NamedTuple):
    """How much is measured."""

    rounds: int
    steps: int
    """Of each kind in each round."""
    spins: bool


@dataclass
class Phase:
    """All that was seen with so many tickets in flight: a list of rounds of ranks a kind."""

    seen: dict[str, list[list[Seen]]] = field(default_factory=dict)
    idle: dict[str, list[Seen]] = field(default_factory=dict)
    proofs: dict[str, list[Proof]] = field(default_factory=dict)


def measure(ranks: int, setting: Setting) -> Iterator[Figure]:
    """Gives the figures of one group size."""
    with Group(ranks) as group:
        for tickets in TICKETS:
            phase = _phase(group, tickets, setting)
            label = f"{ranks} x {tickets:>2}"
            yield from _steps(phase, label, ranks)
            yield from _cpus(phase, label, goal=tickets == TICKETS[-1])
            yield from _messages(phase, label)
            yield from _latencies(phase, label)


def _phase(group: Group, tickets: int, setting: Setting) -> Phase:
    phase = Phase({kind: [] for kind in SIDES})
    for turn in range(setting.rounds):
        at = turn % len(SIDES)
        for kind in (*SIDES[at:], *SIDES[:at]):
            bout = Bout(kind, tickets, setting.steps, setting.spins)
            phase.seen[kind].append(group.bout(bout))
    for kind in _IDLE:
        bout = Bout(kind, tickets, setting.steps, setting.spins, idle=True)
        phase.idle[kind] = group.bout(bout)
    for kind in SIDES:
        if kind != RULER:
            phase.proofs[kind] = group.drain(kind)
    return phase


# -- what a step costs the thread that steps


def _steps(phase: Phase, label: str, ranks: int) -> Iterator[Figure]:
    ruler = _worst(phase.seen[RULER])
    for kind in _TIMED:
        rounds = phase.seen[kind]
        worst = _worst(rounds)
        ratio = worst / ruler
        goal = _OF_ALL_REDUCE[ranks] if kind == WINDOW_8 else None
        each = [_worst([a]) / _worst([b]) for a, b in zip(rounds, phase.seen[RULER], strict=True)]
        yield Figure(
            f"{label}  step: {kind}", "us", worst * 1e6,
            *(() if kind == RULER else (ruler * 1e6, RULER, ratio, min(each), max(each))),
            goals=(Goal(f"<= {goal:.3g} x", ratio <= goal),) if goal else (),
            note=_by_rank(rounds),
        )  # fmt: skip


def _worst(rounds: Sequence[Sequence[Seen]]) -> float:
    """Returns the median of the rank whose median is the highest, in seconds."""
    return max(median(walls) for walls in _of_ranks(rounds, lambda seen: seen.wall))


def _by_rank(rounds: Sequence[Sequence[Seen]]) -> str:
    leader, *followers = _of_ranks(rounds, lambda seen: seen.wall)
    worst = max(followers, key=median)
    return (
        f"leader {median(leader) * 1e6:.0f}, p95 {_p95(leader) * 1e6:.0f}; "
        f"worst follower {median(worst) * 1e6:.0f}, p95 {_p95(worst) * 1e6:.0f}"
    )


def _cpus(phase: Phase, label: str, *, goal: bool) -> Iterator[Figure]:
    for kind in (CARRIED, WINDOW_8, WINDOW_1, COLLECTIVE):
        rounds = phase.seen[kind]
        leader, *followers = _of_ranks(rounds, lambda seen: seen.cpu)
        inputs = _of_ranks(rounds, lambda seen: seen.inputs)[0]
        changes = sum(seen.changes for seen in chain(*rounds))
        rows = changes / sum(len(seen.wall) for seen in chain(*rounds))
        mean = sum(inputs) / len(inputs) * 1e6
        worst = max(map(median, followers)) * 1e6
        yield _cpu(
            f"{label}  CPU: {kind}", leader, goal=goal,
            note=f"p95 {_p95(leader) * 1e6:.0f}; worst follower {worst:.0f}; {rows:.1f} "
            f"facts change a step and rank; its submits {mean:.0f} (mean)",
        )  # fmt: skip
    for kind, seen in phase.idle.items():
        leader = seen[0].cpu
        worst = max(median(each.cpu) for each in seen[1:]) * 1e6
        yield _cpu(
            f"{label}  CPU, idle: {kind}", leader, goal=goal,
            note=f"p95 {_p95(leader) * 1e6:.0f}; worst follower {worst:.0f}",
        )  # fmt: skip


def _cpu(what: str, leader: Sequence[float], *, goal: bool, note: str) -> Figure:
    value = median(leader) * 1e6
    goals = (Goal(f"<= {_PYTHON_US:g}", value <= _PYTHON_US),) if goal else ()
    return Figure(what, "CPU us", value, goals=goals, note=note)


# -- what goes over the links


def _messages(phase: Phase, label: str) -> Iterator[Figure]:
    for kind in (WINDOW_8, WINDOW_1, CARRIED):
        rounds = phase.seen[kind]
        most, least_gap = _reports(rounds), min(each.closest for each in phase.proofs[kind])
        bound = 1 / INTERVAL_S
        yield Figure(
            f"{label}  reports a rank and second: {kind}", "/s", most,
            goals=(Goal(f"<= {bound:g}", most <= bound),),
            note=f"{_mean_bytes(rounds, 'report'):.0f} bytes; closest {least_gap * 1e3:.2f} ms",
        )  # fmt: skip
    for kind, wanted in ((WINDOW_8, 1), (COLLECTIVE, 1), (CARRIED, 0)):
        rounds = phase.seen[kind]
        leaders = [ranks[0] for ranks in rounds]
        steps = sum(len(seen.wall) for seen in leaders)
        records = sum(seen.calls.get("publish", 0) for seen in leaders)
        yield Figure(
            f"{label}  records a step: {kind}", "", records / steps,
            goals=(Goal(f"= {wanted}", records == wanted * steps),),
            note=f"{_mean_bytes(rounds, 'publish'):.0f} bytes" if records else "",
        )  # fmt: skip
    yield from _requests(phase, label)


def _reports(rounds: Sequence[Sequence[Seen]]) -> float:
    """Returns how many the busiest rank sent in a second; of a round, one more may fit."""
    return max(
        sum(max(seen.calls.get("report", 0) - 1, 0) for seen in own)
        / sum(seen.seconds for seen in own)
        for own in list(zip(*rounds, strict=True))[1:]
    )


def _requests(phase: Phase, label: str) -> Iterator[Figure]:
    for kind in (WINDOW_8, CARRIED, COLLECTIVE):
        rounds = phase.seen[kind]
        followers = len(rounds[0]) - 1
        calls, sizes = Counter[str](), Counter[str]()
        for ranks in rounds:
            for seen in ranks[:1] if kind == COLLECTIVE else ranks:
                calls.update(seen.calls)
                sizes.update(seen.bytes)
        ended = sum(ranks[0].ended for ranks in rounds)
        if not ended:
            continue
        records = calls["publish"] * followers / ended
        if kind == COLLECTIVE:
            gathers = {name: calls[name] / ended for name in _VOTES}
            parts = ", ".join(f"{name} {count:.2f}" for name, count in gathers.items())
            yield Figure(
                f"{label}  gathers a request: {kind}", "", sum(gathers.values()),
                note=f"{parts}; {sum(sizes[n] for n in _VOTES) / ended:.0f} bytes a rank; "
                f"and {calls['publish'] / ended:.2f} broadcasts of records",
            )  # fmt: skip
            continue
        reports = calls["report"] / ended
        total = (sizes["report"] + sizes["publish"] * followers) / ended
        yield Figure(
            f"{label}  messages a request: {kind}", "", reports + records,
            note=f"{reports:.2f} reports, {records:.2f} records; {total:.0f} bytes",
        )  # fmt: skip
    steps = sum(len(ranks[0].wall) for ranks in phase.seen[WINDOW_8])
    ended = sum(ranks[0].ended for ranks in phase.seen[WINDOW_8])
    if ended:
        yield Figure(f"{label}  collectives a request: one {RULER} a step", "", steps / ended)


def _mean_bytes(rounds: Iterable[Iterable[Seen]], what: str) -> float:
    seen = list(chain(*rounds))
    calls = sum(each.calls.get(what, 0) for each in seen)
    return sum(each.bytes.get(what, 0) for each in seen) / calls if calls else 0.0


# -- from the last rank's completion to the settlement


def _latencies(phase: Phase, label: str) -> Iterator[Figure]:
    for kind in (WINDOW_8, WINDOW_1, CARRIED, COLLECTIVE):
        proofs = phase.proofs[kind]
        first, last = [], []
        for ticket in proofs[0].settled:
            completed = [proof.completed[ticket] for proof in proofs]
            settled = [proof.settled[ticket] for proof in proofs]
            if len({each.turn for each in (*completed, *settled)}) > 1:
                continue  # the group has rested in between
            done = max(each.at for each in completed)
            first.append(min(each.at for each in settled) - done)
            last.append(max(each.at for each in settled) - done)
        if not first:
            raise SystemExit(f"{kind}: no ticket was read as a whole; more steps are needed")
        yield Figure(
            f"{label}  all read, to settled everywhere: {kind}", "ms", median(last) * 1e3,
            pairs=len(last),
            note=f"p95 {_p95(last) * 1e3:.1f}; on the first rank {median(first) * 1e3:.1f}, "
            f"p95 {_p95(first) * 1e3:.1f}; {len(last)} tickets",
        )  # fmt: skip


def _of_ranks(
    rounds: Iterable[Iterable[Seen]], value: Callable[[Seen], list[float]]
) -> list[list[float]]:
    return [[*chain(*map(value, own))] for own in zip(*rounds, strict=True)]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]
