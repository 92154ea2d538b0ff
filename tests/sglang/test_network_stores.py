"""`sgl.Engine` over each store that a fleet shares: real servers, and the same answers."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from serving import STORED, prompt

from l3store.errors import ConfigError

pytest_plugins = ["serving_fixtures"]


def redis():
    from l3store.servers.redis import RedisServer

    return RedisServer()


def s3():
    from l3store.servers.s3 import S3Server

    return S3Server()


def mooncake():
    from l3store.servers.mooncake import MooncakeServer

    return MooncakeServer()


@pytest.fixture
def url(request):
    with ExitStack() as stack:
        try:
            server = stack.enter_context(request.param())
        except ConfigError as error:
            if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
                raise
            pytest.skip(str(error))
        yield server.url


@pytest.mark.parametrize("url", [redis, s3, mooncake], indirect=True)
def test_a_prompt_comes_back_after_a_flush_and_in_a_new_process(new_engine, url):
    engine = new_engine({"url": url})
    (cold,) = engine.ask(prompt(1))
    assert cold.cached == (0, 0, 0)
    engine.forget()
    (flushed,) = engine.ask(prompt(1))
    engine.kill()
    (anew,) = new_engine({"url": url}).ask(prompt(1))
    for again in (flushed, anew):
        assert again.said == cold.said
        assert again.cached == (STORED, 0, 0)
