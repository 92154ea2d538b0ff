"""Names: what a page, a place and a namespace are called, and why two contents never share a name.

Object name = ``<namespace>/<pool>/<shard>/<page hash>``; the first three are the place.
"""

from __future__ import annotations

from l3store.keys.chain import FIRST_PAGE, Chain, page_hash, seed
from l3store.keys.descriptor import Descriptor, PlaceDescriptor, attach, attach_place, decode_meta
from l3store.keys.grammar import (
    check_keys,
    check_meta_name,
    check_place,
    object_name,
    split_key,
    split_keys,
)
from l3store.keys.shard import Coordinate, head_group_shards, is_writer, shard_name

__all__ = [
    "FIRST_PAGE",
    "Chain",
    "Coordinate",
    "Descriptor",
    "PlaceDescriptor",
    "attach",
    "attach_place",
    "check_keys",
    "check_meta_name",
    "check_place",
    "decode_meta",
    "head_group_shards",
    "is_writer",
    "object_name",
    "page_hash",
    "seed",
    "shard_name",
    "split_key",
    "split_keys",
]
