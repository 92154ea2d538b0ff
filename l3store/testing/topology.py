"""Does a naming scheme ever give two contents one name, or one content two?

`deployments` enumerates what engines run (models, TP, PP, CP, DCP, layouts, dtypes, page sizes),
`contents` says from first principles what a rank's page holds, and `check_naming` compares the
names that a scheme gives with that. A scheme sees a `View` only: what an adapter on one rank can
see. L3Store's own is `L3StoreNames`; anybody's can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from l3store.keys import Coordinate, Descriptor, head_group_shards, is_writer, shard_name
from l3store.testing._topology_models import BYTE_ORDER, Content, Deployment, View, deployments

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BYTE_ORDER",
    "Content",
    "Deployment",
    "Faults",
    "L3StoreNames",
    "NamingScheme",
    "Report",
    "View",
    "check_naming",
    "deployments",
]


class NamingScheme(Protocol):
    """How a store names what a rank writes."""

    def names(self, view: View) -> list[str]:
        """Returns the names of the objects that one page is on this rank, the hash left out.

        One name, or with ``view.head_groups`` one for each group of this rank, in order.
        """

    def writes(self, view: View) -> bool:
        """Returns whether this rank writes them."""


class L3StoreNames:
    """The rule of `l3store.keys`: a namespace by descriptor, a shard by which part of how many."""

    def names(self, view: View) -> list[str]:  # noqa: D102 - as in NamingScheme
        namespace = _namespace(
            view.model, view.weights_revision, view.draft_revision, view.logical_dtype,
            view.page_size, view.pool, view.pool_class, view.layers, view.stages,
            view.object_heads, view.dims, view.object_bytes, BYTE_ORDER[view.layout],
        )  # fmt: skip
        place = f"{namespace}/{view.pool}/"
        at = _coordinate(view)
        if view.head_groups:
            return [place + shard for shard in head_group_shards(at, view.head_groups)]
        return [place + shard_name(at, view.cut)]

    def writes(self, view: View) -> bool:  # noqa: D102
        return is_writer(_coordinate(view), view.cut)


@lru_cache(maxsize=65536)
def _namespace(
    model: str, weights: str, draft: str | None, dtype: str, page_size: int, pool: str,
    pool_class: str, layers: int, stages: tuple[int, ...], heads: int, dims: tuple[int, ...],
    page_bytes: int, byte_order: str,
) -> str:  # fmt: skip
    return Descriptor(
        model=model, weights_revision=weights, draft_revision=draft, dtype=dtype,
        page_size=page_size, pool=pool, pool_class=pool_class, layers=layers,
        stages=stages if len(stages) > 1 else None, heads=heads, dims=dims, page_bytes=page_bytes,
        byte_order=byte_order,
    ).namespace()  # fmt: skip


def _coordinate(view: View) -> Coordinate:
    return Coordinate(
        pp=view.pp, pp_size=view.pp_size, cp=view.cp, cp_size=view.cp_size, tp=view.tp,
        tp_size=view.tp_size, dcp_size=view.dcp_size,
    )  # fmt: skip


class Faults:
    """How many faults of a kind there are, and the first few of them in words."""

    KEPT = 5

    def __init__(self) -> None:
        self.examples: list[str] = []
        self._count = 0

    def add(self, words: str, *values: object) -> None:
        """Counts one; ``words.format(*values)`` is made only while there are few."""
        if self._count < self.KEPT:
            self.examples.append(words.format(*values))
        self._count += 1

    def __len__(self) -> int:
        return self._count


@dataclass(slots=True)
class Report:
    """What a scheme does wrong; no faults for a right one."""

    instances: int = 0
    """Objects named: one for each rank, pool and head group."""
    places: int = 0
    """Different names given."""
    aliases: Faults = field(default_factory=Faults)
    """Names that stand for several contents."""
    missed: Faults = field(default_factory=Faults)
    """Contents that must have one name and have several."""
    writers: Faults = field(default_factory=Faults)
    """Objects of one deployment that nobody writes, or several ranks do."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.aliases or self.missed or self.writers)

    def __str__(self) -> str:
        lines = [f"{self.instances} rank instances, {self.places} names"]
        for title, faults in (
            ("names with another content", self.aliases),
            ("contents with another name", self.missed),
            ("objects without exactly one writer", self.writers),
        ):
            lines.append(f"{len(faults)} {title}")
            lines += [f"  {fault}" for fault in faults.examples]
        return "\n".join(lines)


def check_naming(scheme: NamingScheme, of: Iterable[Deployment] | None = None) -> Report:
    """Names every page of every rank of every deployment, and compares with what it holds.

    Pure computation on the calling thread, single-threaded; blocks for some seconds by default.

    Args:
        scheme: The naming to check.
        of: The deployments; all of `deployments` by default.

    Returns:
        The report; `good` when no name stands for two contents, every content that must be shared
        is (MLA pages across all TP sizes of equal PP; TP-cut pages of equal TP and PP; head groups
        across TP sizes; replicas; layouts of equal byte order), and every object of a deployment
        has exactly one writer in each replica.
    """
    report = Report()
    content_of: dict[str, Content] = {}
    name_of: dict[tuple[object, ...], str] = {}
    for deployment in deployments() if of is None else of:
        writers: dict[str, list[int]] = {}
        seen: dict[str, View] = {}
        for view in deployment.views():
            names, contents, writes = scheme.names(view), view.contents(), scheme.writes(view)
            if len(names) != len(contents):
                report.missed.add("{}: {} names for {} objects", view, len(names), len(contents))
                continue
            for name, content in zip(names, contents, strict=True):
                report.instances += 1
                seen[name] = view
                writers.setdefault(name, [0] * deployment.replicas)[view.dp] += writes
                first = content_of.setdefault(name, content)
                if first != content:
                    report.aliases.add("{}: {}", name, _Difference(first, content))
                other = name_of.setdefault(view.must_share(content), name)
                if other != name:
                    report.missed.add("{}: {} and {}", view, other, name)
        for name, counts in writers.items():
            if any(count != 1 for count in counts):
                report.writers.add("{}, {}: {} writers a replica", name, seen[name], counts)
    report.places = len(content_of)
    return report


class _Difference(NamedTuple):
    one: Content
    two: Content

    def __str__(self) -> str:
        both = zip(Content._fields, self.one, self.two, strict=True)
        return ", ".join(f"{name} {one} and {two}" for name, one, two in both if one != two)
