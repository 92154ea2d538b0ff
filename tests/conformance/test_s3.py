"""The S3 backend keeps the contract, on a real server, by either client library."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import ClassVar

import boto3
import pytest
from botocore.config import Config

from l3store.errors import ConfigError
from l3store.servers.process import HOST
from l3store.servers.s3 import S3Server
from l3store.testing.backend import BackendSuite
from l3store.testing.faults import with_options
from l3store.testing.plugin import NotHere
from l3store.testing.proxy import Proxy
from l3store.testing.suite_late import LateSuite
from tests.backends.s3._stub import Stub

_numbers = itertools.count()
_THROUGH_A_PROXY = ("unreachable", "lost_inside")


@pytest.fixture(scope="module")
def server():
    try:
        with S3Server() as server:
            yield server
    except ConfigError as error:
        raise NotHere(str(error)) from error


@pytest.fixture(scope="module")
def behind_our_back(server):
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1",
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
        config=Config(request_checksum_calculation="when_required"),
    )  # fmt: skip
    yield client
    client.close()


class _S3:
    # A server that shares two cores with whatever else runs may take its time.
    options: ClassVar = {"timeout": "20s", "deadline": "60s"}

    @pytest.fixture(autouse=True)
    def _server(self, request, server, behind_our_back):
        self._at, self._client, self._small = server, behind_our_back, []
        self._proxy = None
        if any(part in request.node.name for part in _THROUGH_A_PROXY):
            self._proxy = Proxy((HOST, server.port))
        yield
        if self._proxy is not None:
            self._proxy.close()
        for small in self._small:
            small.process.kill()

    def url(self, tmp_path):
        port = self._at.port if self._proxy is None else self._proxy.port
        url = self._at.url.replace("l3store?", f"l3store/{next(_numbers)}?")
        return with_options(url.replace(str(self._at.port), str(port)), **self.options)

    def raw_read(self, backend, key):
        try:
            name = backend._names.page(key)
            return self._client.get_object(Bucket="l3store", Key=name)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None

    def raw_write(self, backend, key, data):
        self._client.put_object(Bucket="l3store", Key=backend._names.page(key), Body=data)

    def small_url(self, tmp_path, page_bytes, pages):
        """The stub: no real server here can be full to the page."""
        self._small.append(Stub(tmp_path, capacity=page_bytes * pages))
        return self._small[-1].url(**self.options)

    @contextmanager
    def unreachable(self, backend):
        """Nobody listens any more, and all connections are closed."""
        self._proxy.refuse()
        try:
            yield
        finally:
            self._proxy.restore()


class TestS3(_S3, BackendSuite):
    pass


class _Boto3(_S3):
    options: ClassVar = {**_S3.options, "client": "boto3"}


class TestS3Boto3Late(_Boto3, LateSuite):
    """Whose memory is whose; tests/backends/s3 and tests/network/s3 do more. The soak runs all."""


@pytest.mark.soak
class TestS3Boto3(_Boto3, BackendSuite):
    pass
