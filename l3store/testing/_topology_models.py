"""What engines run, and what a page of each rank holds: worked out without any naming code.

Facts used, as SGLang's host pools and parallel groups have them: kv heads are dealt to TP ranks in
order and repeated when there are more ranks than heads; MLA latents and indexer keys are the same
on all TP ranks; mamba states are cut by TP; a pipeline stage numbers its own layers from 0; draft
layers are packed behind the last stage's; under CP, and under DCP inside TP (rank ``tp % dcp``),
token positions are dealt in turn; both fp8 kinds lie in pools of dtype uint8.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BYTE_ORDER", "Content", "Deployment", "View", "deployments"]

Cut = Literal["tp", "replicated"]

BYTE_ORDER = {
    "layer_first": "k_then_v/layer/token/head",
    "page_first_direct": "k_then_v/layer/token/head",
    "page_first": "k_then_v/token/layer/head",
    "page_head": "k_then_v/head/token/layer",
}
"""Layout of the host pool -> order of the bytes once K is emitted before V."""

_BYTES = {"bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_POOL_DTYPE = {"bfloat16": "bfloat16", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}
_STAGES = {1: (12,), 2: (6, 6), 3: (5, 4, 3), 4: (3, 3, 3, 3)}
HEAD_GROUPS = 8


class Pool(NamedTuple):
    """A kind of per-page payload of a model."""

    name: str
    pool_class: str
    cut: Cut
    heads: int
    dims: tuple[int, ...]
    every: int = 1
    """Of how many layers one has this pool."""
    draft_layers: int = 0
    """Packed behind the last stage's layers."""


MODELS: dict[str, tuple[Pool, ...]] = {
    "mha-8-heads": (Pool("kv", "mha", "tp", 8, (64, 64)),),
    "gqa-2-heads": (Pool("kv", "mha", "tp", 2, (64, 64)),),
    "mla-indexer": (
        Pool("kv", "mla", "replicated", 1, (512, 64)),
        Pool("indexer", "dsa", "replicated", 1, (128,)),
    ),
    "mla-mamba": (
        Pool("kv", "mla", "replicated", 1, (512, 64), every=3),
        Pool("mamba", "mamba2", "tp", 8, (128,), every=2),
    ),
    "hybrid-draft": (
        Pool("kv", "mha", "tp", 8, (64, 64), every=3, draft_layers=1),
        Pool("swa", "mha", "tp", 8, (64, 64), every=2),
    ),
}


class Content(NamedTuple):
    """What the bytes of an object are: equal contents are equal bytes, and no others are."""

    model: str
    pool: str
    dtype: str
    byte_order: str
    page_size: int
    layers: tuple[str, ...]
    heads: tuple[int, ...]
    positions: tuple[int, int, int, int]
    """Which tokens of the page: cp rank of size, then dcp rank of size."""


@dataclass(frozen=True, slots=True)
class View:
    """What an adapter sees on one rank of one pool; `_model_pool` is for `contents` alone."""

    model: str
    pool: str
    pool_class: str
    cut: Cut
    layout: str
    pool_dtype: str
    logical_dtype: str
    page_size: int
    layers: int
    """Layers of the host pool; the stage numbers them from 0."""
    heads: int
    """Heads of the host pool on this rank."""
    dims: tuple[int, ...]
    dp: int
    pp: int
    pp_size: int
    cp: int
    cp_size: int
    tp: int
    tp_size: int
    dcp_size: int
    head_groups: int
    """0: a page is one object; else it is ``head_groups / tp_size`` objects."""
    _model_pool: Pool

    @property
    def object_heads(self) -> int:
        """Heads in one object."""
        if not self.head_groups:
            return self.heads
        return self.heads * self.tp_size // self.head_groups

    @property
    def object_bytes(self) -> int:
        """Payload bytes of one object."""
        tokens = self.page_size // (self.cp_size * self.dcp_size)
        entry = sum(self.dims) * _BYTES[self.logical_dtype]
        return tokens * self.layers * self.object_heads * entry

    def contents(self) -> list[Content]:
        """Returns what each object of a page holds, in the order of the scheme's names."""
        pool = self._model_pool
        heads = _heads(pool, self.tp // self.dcp_size, self.tp_size // self.dcp_size)
        groups = [heads]
        if self.head_groups:
            each = self.object_heads
            groups = [heads[at : at + each] for at in range(0, len(heads), each)]
        where = (self.cp, self.cp_size, self.tp % self.dcp_size, self.dcp_size)
        order = BYTE_ORDER[self.layout]
        return [
            Content(
                self.model, self.pool, self.logical_dtype, order, self.page_size,
                _layers(pool, self.pp, self.pp_size), group, where,
            )
            for group in groups
        ]  # fmt: skip

    def must_share(self, content: Content) -> tuple[object, ...]:
        """Returns a key: objects with equal keys must have one name.

        Replicated pools share over all TP sizes, head groups too; TP-cut pools at equal TP only,
        and each rank its own part (copies of a repeated head are not promised to be shared).
        """
        if self.cut == "replicated" or self.head_groups:
            return (content, self.pp_size, self.head_groups)
        return (content, self.pp_size, self.tp, self.tp_size)


def _layers(pool: Pool, stage: int, stages: int) -> tuple[str, ...]:
    """The model's own layer numbers on a stage that have this pool, and packed draft layers."""
    sizes = _STAGES[stages]
    first = sum(sizes[:stage])
    own = [str(n) for n in range(first, first + sizes[stage]) if n % pool.every == 0]
    draft = [f"draft {n}" for n in range(pool.draft_layers)] if stage == stages - 1 else []
    return tuple(own + draft)


def _heads(pool: Pool, part: int, parts: int) -> tuple[int, ...]:
    if pool.cut == "replicated":
        return tuple(range(pool.heads))
    if parts > pool.heads:  # repeated: several ranks hold one head
        return (part * pool.heads // parts,)
    mine = pool.heads // parts
    return tuple(range(part * mine, (part + 1) * mine))


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way to run one model."""

    model: str
    layout: str
    dtype: str
    page_size: int
    pp_size: int
    cp_size: int
    tp_size: int
    dcp_size: int
    replicas: int = 1
    head_groups: int = 0

    def views(self) -> Iterator[View]:
        """Yields every pool of every rank that has layers in it."""
        ranks = itertools.product(
            range(self.replicas), range(self.pp_size), range(self.cp_size), range(self.tp_size)
        )
        for dp, pp, cp, tp in ranks:
            for pool in MODELS[self.model]:
                layers = len(_layers(pool, pp, self.pp_size))
                if not layers:
                    continue
                groups = self.head_groups if pool.cut == "tp" else 0
                parts = self.tp_size // self.dcp_size
                yield View(
                    self.model, pool.name, pool.pool_class, pool.cut, self.layout,
                    _POOL_DTYPE[self.dtype], self.dtype, self.page_size, layers,
                    len(_heads(pool, tp // self.dcp_size, parts)), pool.dims, dp, pp, self.pp_size,
                    cp, self.cp_size, tp, self.tp_size, self.dcp_size, groups, pool,
                )  # fmt: skip


def deployments() -> Iterator[Deployment]:
    """Yields TP {1,2,4,8} x PP {1,2,3 uneven,4} x CP {1,2} x DCP x models x layouts x dtypes."""
    for model, layout, dtype, page_size, pp, cp, tp in itertools.product(
        MODELS, BYTE_ORDER, _BYTES, (16, 64), _STAGES, (1, 2), (1, 2, 4, 8)
    ):
        for dcp in (1, 2, 4):
            if tp % dcp == 0:
                yield Deployment(model, layout, dtype, page_size, pp, cp, tp, dcp)
        if cp == 1 and tp <= 2:
            yield Deployment(model, layout, dtype, page_size, pp, cp, tp, 1, replicas=2)
        if layout == "page_head" and model == "mha-8-heads":
            yield Deployment(model, layout, dtype, page_size, pp, cp, tp, 1, 1, HEAD_GROUPS)
