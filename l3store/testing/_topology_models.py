"""What engines run, and what a page of each rank holds: worked out without any naming code.

Facts used, as engines have them. KV heads are dealt to TP ranks in order and repeated when there
are more ranks than heads; MLA latents and indexer keys are the same on all TP ranks; mamba states
are cut by TP and belong to no single token. A pipeline stage numbers its own layers from 0, and how
many layers each stage has is a setting, whose default has changed between versions of one engine;
draft layers are packed behind the last stage's. Prefill CP leaves every CP rank a whole copy of the
KV, or its own layers, or its own tokens. DCP, inside TP (rank ``tp % dcp``), deals tokens in turn,
but not those of indexer and mamba, which are whole on every rank. The TP rank that an engine tells
an adapter may be counted over the CP ranks. Both fp8 kinds lie in pools of dtype uint8.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BYTE_ORDER", "Content", "Deployment", "View", "deployments"]

Cut = Literal["tp", "replicated"]
ContextCut = Literal["tokens", "layers", "copies"]
"""What prefill CP leaves on a rank."""

BYTE_ORDER = {
    "layer_first": "k_then_v/layer/token/head",
    "page_first_direct": "k_then_v/layer/token/head",
    "page_first": "k_then_v/token/layer/head",
    "page_head": "k_then_v/head/token/layer",
}
"""Layout of the host pool -> order of the bytes once K is emitted before V."""

_BYTES = {"bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_POOL_DTYPE = {"bfloat16": "bfloat16", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}
_STAGES = ((12,), (6, 6), (5, 4, 3), (3, 3, 3, 3))
_OTHER_STAGES = ((7, 5), (5, 7), (3, 4, 5), (4, 4, 4), (3, 2, 3, 4), (2, 3, 3, 4))
"""Other cuts of the same layers, each with a stage whose count of layers is met above."""
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
    cp_deals: bool = True
    """Whether prefill CP that cuts tokens cuts this pool."""
    dcp_deals: bool = True


MODELS: dict[str, tuple[Pool, ...]] = {
    "mha-8-heads": (Pool("kv", "mha", "tp", 8, (64, 64)),),
    "gqa-2-heads": (Pool("kv", "mha", "tp", 2, (64, 64)),),
    "mla-indexer": (
        Pool("kv", "mla", "replicated", 1, (512, 64)),
        Pool("indexer", "dsa", "replicated", 1, (128,), dcp_deals=False),
    ),
    "mla-mamba": (
        Pool("kv", "mla", "replicated", 1, (512, 64), every=3),
        Pool("mamba", "mamba2", "tp", 8, (128,), every=2, cp_deals=False, dcp_deals=False),
    ),
    "hybrid-draft": (
        Pool("kv", "mha", "tp", 8, (64, 64), every=3, draft_layers=1),
        Pool("swa", "mha", "tp", 8, (64, 64), every=2),
    ),
}


class Content(NamedTuple):
    """What the bytes of an object are: equal contents are equal bytes, and no others are."""

    model: str
    weights: str
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
    weights_revision: str
    draft_revision: str | None
    pool: str
    pool_class: str
    cut: Cut
    layout: str
    pool_dtype: str
    logical_dtype: str
    page_size: int
    layers: int
    """Layers of the host pool; the stage numbers them from 0."""
    stages: tuple[int, ...]
    """The model's layers of each pipeline stage, drafts not counted: from the engine's settings."""
    heads: int
    """Heads of the host pool on this rank."""
    dims: tuple[int, ...]
    tokens: int
    """Tokens of a page that are on this rank."""
    dp: int
    pp: int
    cp: int
    cp_size: int
    tp: int
    """Among the ranks of one CP rank."""
    tp_size: int
    dcp_size: int
    """1 for pools that DCP does not deal."""
    head_groups: int
    """0: a page is one object; else it is ``head_groups / tp_size`` objects."""
    context_cut: ContextCut
    _model_pool: Pool

    def __str__(self) -> str:
        return (
            f"{self.model} {self.pool} on dp {self.dp}, pp {self.pp} of {self.stages}, "
            f"cp {self.cp} of {self.cp_size}, tp {self.tp} of {self.tp_size}, dcp {self.dcp_size}"
        )

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def engine_tp(self) -> int:
        """The TP rank as SGLang tells it without DP attention: counted over the CP ranks."""
        return self.cp * self.tp_size + self.tp

    @property
    def object_heads(self) -> int:
        """Heads in one object."""
        if not self.head_groups:
            return self.heads
        return self.heads * self.tp_size // self.head_groups

    @property
    def object_bytes(self) -> int:
        """Payload bytes of one object."""
        entry = sum(self.dims) * _BYTES[self.logical_dtype]
        return self.tokens * self.layers * self.object_heads * entry

    def contents(self) -> list[Content]:
        """Returns what each object of a page holds, in the order of the scheme's names."""
        pool = self._model_pool
        groups = [_heads(pool, self.tp // self.dcp_size, self.tp_size // self.dcp_size)]
        if self.head_groups:
            each = self.object_heads
            groups = [groups[0][at : at + each] for at in range(0, len(groups[0]), each)]
        cp = (self.cp, self.cp_size) if _deals(pool, self.context_cut) else (0, 1)
        where = (*cp, self.tp % self.dcp_size, self.dcp_size)
        layers = _layers(
            pool, self.stages, self.pp, self.draft_revision, self.cp, self.cp_size, self.context_cut
        )
        return [
            Content(
                self.model, self.weights_revision, self.pool, self.logical_dtype,
                BYTE_ORDER[self.layout], self.page_size, layers, group, where,
            )
            for group in groups
        ]  # fmt: skip

    def must_share(self, content: Content) -> tuple[object, ...]:
        """Returns a key: objects with equal keys must have one name.

        Replicated pools share over all TP sizes, head groups too; TP-cut pools at equal TP only,
        and each rank its own part. Not promised: copies (of a repeated head, of CP ranks), and
        sharing with deployments whose stages are cut in another way or that have another draft.
        """
        same = (content, self.stages, self.draft_revision, self.cp, self.cp_size, self.head_groups)
        if self.cut == "replicated" or self.head_groups:
            return same
        return (*same, self.tp, self.tp_size)


@lru_cache(maxsize=4096)
def _layers(
    pool: Pool, stages: tuple[int, ...], stage: int, draft: str | None, cp: int, cp_size: int,
    context_cut: ContextCut,
) -> tuple[str, ...]:  # fmt: skip
    """The model's own layer numbers on a rank that have this pool, and packed draft layers."""
    first = sum(stages[:stage])
    layers = [str(n) for n in range(first, first + stages[stage]) if n % pool.every == 0]
    if draft and stage == len(stages) - 1:
        layers += [f"{draft} {n}" for n in range(pool.draft_layers)]
    if context_cut == "layers":
        layers = layers[len(layers) * cp // cp_size : len(layers) * (cp + 1) // cp_size]
    return tuple(layers)


@lru_cache(maxsize=4096)
def _heads(pool: Pool, part: int, parts: int) -> tuple[int, ...]:
    if pool.cut == "replicated":
        return tuple(range(pool.heads))
    if parts > pool.heads:  # repeated: several ranks hold one head
        return (part * pool.heads // parts,)
    mine = pool.heads // parts
    return tuple(range(part * mine, (part + 1) * mine))


def _deals(pool: Pool, context_cut: ContextCut) -> bool:
    return pool.cp_deals and context_cut == "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One way to run one model."""

    model: str
    layout: str = "layer_first"
    dtype: str = "bfloat16"
    page_size: int = 64
    stages: tuple[int, ...] = (12,)
    cp_size: int = 1
    tp_size: int = 1
    dcp_size: int = 1
    replicas: int = 1
    head_groups: int = 0
    context_cut: ContextCut = "tokens"
    weights_revision: str = "1"
    draft_revision: str | None = "draft"

    def views(self) -> Iterator[View]:
        """Yields every pool of every rank that has layers in it."""
        ranks = itertools.product(
            range(self.replicas), range(len(self.stages)), range(self.cp_size), range(self.tp_size)
        )
        for dp, pp, cp, tp in ranks:
            for pool in MODELS[self.model]:
                draft = self.draft_revision if pool.draft_layers else None
                layers = len(_layers(pool, self.stages, pp, draft, cp, self.cp_size,
                                     self.context_cut))  # fmt: skip
                if not layers:
                    continue
                dcp = self.dcp_size if pool.dcp_deals else 1
                parts = dcp * (self.cp_size if _deals(pool, self.context_cut) else 1)
                yield View(
                    self.model, self.weights_revision, draft, pool.name, pool.pool_class, pool.cut,
                    self.layout, _POOL_DTYPE[self.dtype], self.dtype, self.page_size, layers,
                    self.stages, len(_heads(pool, tp // dcp, self.tp_size // dcp)), pool.dims,
                    self.page_size // parts, dp, pp, cp, self.cp_size, tp, self.tp_size, dcp,
                    self.head_groups if pool.cut == "tp" else 0, self.context_cut, pool,
                )  # fmt: skip


def deployments() -> Iterator[Deployment]:
    """Yields TP {1,2,4,8} x PP {1,2,3 uneven,4} x CP {1,2} x DCP x models x layouts x dtypes.

    And, at fewer sizes: other cuts of the stages and under CP, other weights and drafts, replicas.
    """
    for model, layout, dtype, page_size, stages, cp, tp in itertools.product(
        MODELS, BYTE_ORDER, _BYTES, (16, 64), _STAGES, (1, 2), (1, 2, 4, 8)
    ):
        one = Deployment(
            model=model, layout=layout, dtype=dtype, page_size=page_size, stages=stages,
            cp_size=cp, tp_size=tp,
        )  # fmt: skip
        yield from (replace(one, dcp_size=dcp) for dcp in (1, 2, 4) if tp % dcp == 0)
        if cp == 1 and tp <= 2:
            yield replace(one, replicas=2)
        if layout == "page_head" and model == "mha-8-heads":
            yield replace(one, head_groups=HEAD_GROUPS)
    for model, stages, cp, tp in itertools.product(
        MODELS, _STAGES + _OTHER_STAGES, (1, 2), (1, 2, 4)
    ):
        one = Deployment(model=model, stages=stages, cp_size=cp, tp_size=tp)
        yield from (one, replace(one, weights_revision="2"))
        if cp > 1:
            yield replace(one, context_cut="layers")
            yield replace(one, context_cut="copies")
        if any(pool.draft_layers for pool in MODELS[model]):
            yield replace(one, draft_revision=None)
            yield replace(one, draft_revision="other draft")
