"""LMCache's client of S3, over awscrt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lmcache_l2 import serve_adapter  # first: it sets what LMCache reads when it is imported

# isort: split
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2AdapterConfig

if TYPE_CHECKING:
    import argparse


def _config(given: argparse.Namespace) -> Any:
    """Its defaults; the bucket would stand in the host's name, the stub does not look."""
    return S3L2AdapterConfig.from_dict(
        {
            "s3_endpoint": given.address,
            "s3_region": "us-east-1",
            "disable_tls": True,
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
    )


if __name__ == "__main__":
    serve_adapter(_config)
