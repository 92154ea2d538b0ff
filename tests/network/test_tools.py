"""The commands over each store that is on a network, as an operator calls them."""

from __future__ import annotations

import importlib
import json
import os
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from l3store import registry
from l3store.cli import main
from l3store.errors import ConfigError
from l3store.testing.kit import Pages

SERVERS = {
    "redis": ("RedisServer", {"password": "hidden-word"}),
    "s3": ("S3Server", {}),
    "mooncake": ("MooncakeServer", {}),
}


@pytest.fixture(scope="module", params=SERVERS)
def url(request):
    name, options = SERVERS[request.param]
    kind = getattr(importlib.import_module(f"l3store.servers.{request.param}"), name)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(kind(**options))
        except ConfigError as error:
            if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
                raise
            pytest.skip(str(error))
        yield server.url


def run(*words, code=0):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    return result.output


def test_a_trace_is_replayed_and_every_byte_checked(url):
    said = run("replay", "--synthetic", "1", "--requests", "20", "--page-bytes", "64KiB",
               "--url", url, "--json")  # fmt: skip
    seen = json.loads(said.splitlines()[-1])
    assert seen["mismatched_pages"] == 0
    assert seen["hit_pages"] > 0
    assert seen["set_pages"] > 0


def test_what_is_stored_is_seen_and_checked(url):
    pages = Pages(place="tools-0/kv/all", seed=7)
    with registry.open(url) as store:
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 8
    listed = json.loads(run("ls", url, "tools-0", "--json", "--pages"))
    assert sorted(one["key"] for one in listed["pages"]) == sorted(pages.keys)
    assert json.loads(run("verify", url, "--place", "tools-0/kv/all", "--json"))["pages"] == 8
    assert "ok" in run("stat", url)
    assert json.loads(run("stat", url, "--json"))["health"] == "ok"


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_no_command_prints_what_is_secret(url, command):
    hidden = [word.partition("=")[2] for word in url.partition("?")[2].split("&") if "key" in word]
    for more in ((), ("--json",)):
        said = run(command, url, *more)
        assert not [secret for secret in hidden if secret in said]
