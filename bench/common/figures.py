"""Figures: pairs of timed halves, what comes of them, and whether a goal is reached."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Figure", "Goal", "Half", "Pairs", "at_least", "at_most", "headings", "paired"]

GB = 1e9


class Half(NamedTuple):
    """One timed batch of one side."""

    wall: float
    cpu: float
    """Seconds of all threads of the process."""


@dataclass
class Pairs:
    """Halves of ours and of the other, of the same number of bytes each."""

    batch_bytes: int
    ours: list[Half] = field(default_factory=list)
    other: list[Half] = field(default_factory=list)
    sum_cpu: float = 0.0
    """CPU seconds that bare xxh3 took over `sum_bytes` of what was read, in the same minutes."""
    sum_bytes: int = 0

    @property
    def ratios(self) -> list[float]:
        """Our speed as a share of the other's, a value a pair."""
        return [b.wall / a.wall for a, b in zip(self.ours, self.other, strict=True)]

    def speed(self, half: Sequence[Half]) -> float:
        """GB/s, median."""
        return self.batch_bytes / median(one.wall for one in half) / GB

    @property
    def cpu_ratios(self) -> list[float]:
        """Our CPU seconds as a share of the other's, a value a pair."""
        return [a.cpu / b.cpu for a, b in zip(self.ours, self.other, strict=True)]

    def cpu(self, half: Sequence[Half]) -> float:
        """CPU seconds a GB over all batches."""
        return sum(one.cpu for one in half) / (len(half) * self.batch_bytes) * GB

    def checksum_cost(self) -> str:
        """What the checksum alone costs here, for a reader of CPU figures."""
        if not self.sum_bytes:
            return ""
        return f"bare xxh3 of such bytes {self.sum_cpu / self.sum_bytes * GB:.3f} CPU s/GB"


def paired(
    count: int, ours: Callable[[int], Half], other: Callable[[int], Half], pairs: Pairs
) -> None:
    """Runs `count` pairs; which side goes first alternates from pair to pair."""
    for i in range(count):
        if len(pairs.ours) % 2:
            theirs = other(i)
            pairs.ours.append(ours(i))
            pairs.other.append(theirs)
        else:
            pairs.ours.append(ours(i))
            pairs.other.append(other(i))


class Goal(NamedTuple):
    """A bound, and whether it holds."""

    text: str
    reached: bool


def at_least(value: float, bound: float) -> Goal:
    return Goal(f">= {bound:g}", value >= bound)


def at_most(value: float, *bounds: float) -> Goal:
    return Goal(f"<= {min(bounds):.3g}", value <= min(bounds))


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    unit: str
    ours: float
    other: float | None = None
    against: str = ""
    ratio: float | None = None
    low: float | None = None
    """Of the ratios of single pairs, one in ten is below this."""
    high: float | None = None
    pairs: int = 0
    goals: tuple[Goal, ...] = ()
    note: str = ""

    @property
    def reached(self) -> bool:
        return all(goal.reached for goal in self.goals)

    @classmethod
    def speeds(
        cls, what: str, pairs: Pairs, against: str, *, least: float | None = None, note: str = ""
    ) -> Figure:
        """Throughput against another's in the same pairs: the median of the ratios counts."""
        return cls(
            what, "GB/s", pairs.speed(pairs.ours), pairs.speed(pairs.other), against,
            *_spread(pairs.ratios), len(pairs.ratios),
            () if least is None else (at_least(median(pairs.ratios), least),), note,
        )  # fmt: skip

    @classmethod
    def times(
        cls, what: str, pairs: Pairs, against: str, *, most: float | None = None, note: str = ""
    ) -> Figure:
        """Milliseconds a batch against another's in the same pairs: the median ratio counts."""
        ours, other = (
            median(half.wall for half in side) * 1e3 for side in (pairs.ours, pairs.other)
        )
        ratios = [1 / ratio for ratio in pairs.ratios]
        return cls(
            what, "ms", ours, other, against, *_spread(ratios), len(ratios),
            () if most is None else (at_most(median(ratios), most),), note,
        )  # fmt: skip

    @classmethod
    def cpus(
        cls, what: str, pairs: Pairs, against: str, goals: Sequence[Goal] = (), note: str = ""
    ) -> Figure:
        """CPU seconds a GB, both sides', over all batches; the spread is that of single pairs."""
        ours, other = pairs.cpu(pairs.ours), pairs.cpu(pairs.other)
        _, low, high = _spread(pairs.cpu_ratios)
        return cls(
            what, "CPU s/GB", ours, other, against, ours / other, low, high,
            len(pairs.ours), tuple(goals), note,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "goals": [goal.text for goal in self.goals],
            "ok": self.reached if self.goals else None,
        }  # fmt: skip

    def line(self) -> str:
        other = f"{_number(self.other):>7} {self.against:<11}" if self.other is not None else ""
        ratio = f"{self.ratio:.2f}" if self.ratio is not None else ""
        spread = f"({self.low:.2f}-{self.high:.2f})" if self.low is not None else ""
        goal = " and ".join(goal.text for goal in self.goals)
        verdict = ("ok" if self.reached else "MISSED") if self.goals else "-"
        return (
            f"{self.what:<60}{_number(self.ours):>8} {self.unit:<9}{other:<20}{ratio:>6} "
            f"{spread:<12}{goal:>17}  {verdict:<7}{self.note}"
        ).rstrip()


def headings(spread: str, last: str) -> str:
    """Returns the line above the figures."""
    return (
        f"{'figure':<60}{'ours':>8} {'':<9}{'other':>7} {'':<12}{'ratio':>6} {spread:<12}"
        f"{'goal':>17}  {'':<7}{last}"
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the bounds of the middle 80 %."""
    ranked = sorted(values)
    tenth = len(ranked) // 10
    return median(ranked), ranked[tenth], ranked[-tenth - 1]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
