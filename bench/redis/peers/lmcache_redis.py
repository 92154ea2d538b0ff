"""LMCache's clients of a Redis or Valkey server: resp (its own, in C++) and valkey (glide)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_l2 import serve_adapter  # first: it sets what LMCache reads when it is imported

# isort: split
from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.valkey_l2_adapter import ValkeyL2AdapterConfig

if TYPE_CHECKING:
    import argparse


def _config(given: argparse.Namespace) -> Any:
    """Each with its default of eight workers, which are as many connections."""
    host, _, port = given.address.rpartition(":")
    if given.kind == "resp":
        return RESPL2AdapterConfig.from_dict({"host": host, "port": int(port)})
    return ValkeyL2AdapterConfig.from_dict({"startup_nodes": given.address})


if __name__ == "__main__":
    serve_adapter(_config)
