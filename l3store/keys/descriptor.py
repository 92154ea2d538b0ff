"""Descriptors: everything that must match for bytes to be exchangeable, and its digest.

A namespace is a readable slug of the model plus the digest of its descriptor. The descriptor itself
is stored by `put_meta` at attach, so tools can say what a namespace holds.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import msgspec

from l3store.errors import ConfigError
from l3store.keys._framing import frame
from l3store.keys.grammar import NAMESPACE_MAX, check_meta_name

if TYPE_CHECKING:
    from l3store.abc import Backend

__all__ = ["SCHEMA", "Descriptor", "PlaceDescriptor", "attach", "attach_place", "decode_meta"]

SCHEMA = 1
_DIGEST_DIGITS = 20  # 80 bits: 1e6 namespaces collide with probability 4e-13
_AMBIGUOUS_DTYPES = {"uint8": "fp8_e4m3 and fp8_e5m2 pools both say so"}


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one pool of one model holds. Every field is part of the namespace.

    None means "the engine has no such thing" and differs from "".
    """

    model: str
    """Model name as the engine was given it."""
    dtype: str
    """Logical KV dtype, such as ``bfloat16`` or ``fp8_e4m3``; never ``uint8``."""
    page_size: int
    """Tokens a page, as the prefix tree counts them."""
    pool: str
    """``kv``, or the sidecar's name: ``indexer``, ``mamba``, ``swa``."""
    pool_class: str
    """How the pool is built, such as ``mha``, ``mla``, ``mamba2``."""
    layers: int
    """Layers of this pool that one object holds."""
    heads: int
    """KV heads that one object holds; 1 for MLA."""
    dims: tuple[int, ...]
    """Sizes of one token's entry: head dims, or latent and rope dims."""
    page_bytes: int
    """Payload bytes of one object."""
    byte_order: str = "k_then_v"
    """Order of the payload: all K segments, then all V. Layouts with equal order share bytes."""
    physical_page_size: int | None = None
    """Tokens of the pool's own page, where it differs from `page_size`."""
    stages: tuple[int, ...] | None = None
    """The model's layers of each pipeline stage, drafts not counted; None for a single stage.

    Part and size do not tell a stage's layers: the cut is a setting, and its default differs
    between engines and between versions of one.
    """
    interleave: int = 1
    """Tokens that context parallelism deals to a rank in a run; dealing by block is other bytes."""
    weights_revision: str | None = None
    draft_revision: str | None = None
    quantization: str | None = None
    tag: str | None = None
    """An operator's word to keep deployments apart."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.dtype in _AMBIGUOUS_DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not a logical dtype: {_AMBIGUOUS_DTYPES[self.dtype]}"
            )
        for name in ("page_size", "layers", "heads", "page_bytes", "interleave"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    def digest(self) -> str:
        """Returns the first 20 hexadecimal digits of SHA-256 over all framed fields."""
        state = hashlib.sha256(b"l3store.namespace.1")
        for name in sorted(self.__struct_fields__):
            state.update(frame(name) + frame(getattr(self, name)))
        return state.hexdigest()[:_DIGEST_DIGITS]

    def namespace(self) -> str:
        """Returns the namespace: a slug of the model name and the digest."""
        tail = "-" + self.digest()
        slug = re.sub(r"[^a-z0-9._-]+", "-", self.model.lower()).strip("._-")
        return (slug or "model")[: NAMESPACE_MAX - len(tail)] + tail


class PlaceDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one shard of a pool holds; for people and tools, compared by nobody."""

    layer_start: int
    layer_end: int
    """Exclusive."""
    head_start: int
    head_end: int
    """Exclusive."""
    segments: tuple[int, ...]
    """Bytes of each payload segment as the writer sees them."""
    schema: int = SCHEMA


def decode_meta(name: str, data: bytes) -> Descriptor | PlaceDescriptor:
    """Returns the descriptor stored under `name` (a namespace or a place).

    Raises:
        ConfigError: The bytes are no descriptor, or one of another schema.
    """
    kind: type[Descriptor | PlaceDescriptor]
    kind = PlaceDescriptor if "/" in check_meta_name(name) else Descriptor
    try:
        # The schema first: fields of another one would only be called unknown.
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"descriptor of {name!r} cannot be read: {error}") from error
    raise ConfigError(
        f"descriptor of {name!r} has schema {schema}; this version reads schema {SCHEMA}"
    )


class _SchemaOnly(msgspec.Struct):
    schema: int


def attach(backend: Backend, descriptor: Descriptor) -> str:
    """Announces `descriptor` in the store and returns its namespace. Blocks for one or two trips.

    Call it once at start, on the main thread. With a read-only store nothing is written.

    Raises:
        ConfigError: The store holds another descriptor under that name; the message names the
            field and both values.
        BackendUnavailable: The store does not answer.
    """
    name = descriptor.namespace()
    stored = backend.get_meta(name)
    if stored is None:
        if not backend.capabilities.read_only:
            backend.put_meta(name, msgspec.json.encode(descriptor))
        return name
    found = decode_meta(name, stored)
    for field in descriptor.__struct_fields__:
        ours, theirs = getattr(descriptor, field), getattr(found, field)
        if ours != theirs:
            raise ConfigError(
                f"namespace {name!r}: the stored descriptor says {field} = {theirs!r}, "
                f"this process says {ours!r}; use another tag or store"
            )
    return name


def attach_place(backend: Backend, place: str, described: PlaceDescriptor) -> None:
    """Says in the store what `place` holds, if nobody did. Blocks for one or two trips.

    Raises:
        BackendUnavailable: The store does not answer.
    """
    if not backend.capabilities.read_only and backend.get_meta(place) is None:
        backend.put_meta(place, msgspec.json.encode(described))
