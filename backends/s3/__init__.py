"""``s3://bucket/prefix?endpoint=...``: pages as objects of S3 or of what speaks like it.

    <prefix>/<2 hash digits>/<key>    a page: header first, then the payload
    <prefix>/_l3/store.json           kind, format, hash digits in names (names, opening)
    <prefix>/_l3/meta/<name>          descriptors, their slashes written as commas
    <prefix>/_l3/bytes/<place>        the payload bytes of a place's pages
    <prefix>/_l3/health               what `health` writes and reads

`obstore_client` moves pages (`boto3_client` with ``client=boto3``); boto3 finds credentials and
does what tools ask for: lists and deletes. What a client's library raises becomes a `Failure`
(`answers`), which is a miss or a typed error for the `backend`. `requests` run on threads that
are left behind at the deadline (`crew`). docs/backends/s3.md tells sizing, costs and what happens
in failures.
"""

from __future__ import annotations

try:
    from l3store.backends.s3.backend import S3Backend
    from l3store.backends.s3.options import S3Options
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "l3store":
        raise
    raise ImportError(f"{error.name} is not installed: pip install 'l3store[s3]'") from error

__all__ = ["S3Backend", "S3Options"]
