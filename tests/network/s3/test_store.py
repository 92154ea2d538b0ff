"""S3 on a real server: what others do to it behind our back, and who may ask."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config

from l3store import page, registry
from l3store.abc import call_deadline
from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError
from l3store.servers.s3 import S3Server
from l3store.testing.faults import DOWN, failing, until_well, with_options
from l3store.testing.kit import Pages, bare
from l3store.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from l3store.abc import Backend
    from l3store.servers.certificates import Certificates

_numbers = itertools.count()
_CLIENTS = ("obstore", "boto3")


@pytest.fixture(params=_CLIENTS)
def client(request):
    return request.param


@pytest.fixture
def prefix():
    return f"store-{next(_numbers)}"


@pytest.fixture
def url(s3_server: S3Server, prefix: str, client: str) -> str:
    # The machine may be busy; what must end sooner says so itself.
    url = s3_server.url.replace("l3store?", f"l3store/{prefix}?")
    return with_options(url, client=client, timeout="5s", deadline="20s")


@pytest.fixture
def store(url: str) -> Iterator[Backend]:
    with registry.open(url) as store:
        yield store


def behind_our_back(server: S3Server):
    return boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1",
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
        config=Config(request_checksum_calculation="when_required"),
    )  # fmt: skip


@pytest.fixture
def admin(s3_server: S3Server):
    client = behind_our_back(s3_server)
    yield client
    client.close()


@pytest.fixture
def put(admin, store: Backend) -> Callable[[str, bytes], None]:
    names = bare(store)._names  # type: ignore[attr-defined]
    return lambda key, data: admin.put_object(Bucket="l3store", Key=names.page(key), Body=data)


# -- who asks, and where -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"access_key": "nobody"}, "InvalidAccessKeyId"),
        ({"secret_key": "nothing"}, "SignatureDoesNotMatch"),
        ({"bucket": "another"}, "NoSuchBucket"),
        ({"scheme": "https"}, "TLS|SSL"),
    ],
)
def test_what_is_wrong_at_opening_is_told_with_the_servers_reason(
    s3_server, prefix, client, wrong, says
):
    given = {
        "access_key": s3_server.access_key, "secret_key": s3_server.secret_key,
        "bucket": s3_server.bucket, "scheme": "http", **wrong,
    }  # fmt: skip
    url = (
        f"s3://{given['bucket']}/{prefix}?endpoint={given['scheme']}://127.0.0.1:{s3_server.port}"
        f"&access_key={given['access_key']}&secret_key={given['secret_key']}&client={client}"
    )
    with pytest.raises(ConfigError, match=says) as caught:
        registry.open(url)
    assert given["secret_key"] not in str(caught.value)


@pytest.fixture(scope="module")
def secure(certificates: Certificates) -> Iterator[S3Server]:
    with S3Server(tls=certificates) as server:
        yield server


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")  # what verify=false is
def test_tls_is_checked(secure, certificates, client):
    url = with_options(secure.url, client=client, timeout="5s")
    pages = Pages(count=3, size=50_000)
    with registry.open(with_options(url, ca_bundle=certificates.ca)) as store:
        until_well(store, pages)
    with registry.open(with_options(url, verify="false")) as store:
        assert store.batch_exists(pages.keys) == 3
    for wrong in ({"ca_bundle": certificates.wrong_ca}, {}):
        with pytest.raises(ConfigError, match=r"(?i)certificate"):
            registry.open(with_options(url, **wrong))
    # Its reason may come before it closes the connection, or not.
    with pytest.raises((ConfigError, BackendUnavailable), match=r"HTTPS|400|[Cc]onnection"):
        registry.open(url.replace("endpoint=https", "endpoint=http"))


# -- behind our back -----------------------------------------------------------------------------


def test_a_page_that_goes_between_lookup_and_read_is_a_miss(store, admin):
    pages = Pages(count=3)
    store.page_set(pages.keys, pages.sealed())
    assert store.batch_exists(pages.keys) == 3
    names = bare(store)._names
    admin.delete_object(Bucket="l3store", Key=names.page(pages.keys[1]))
    assert store.page_get(pages.keys, pages.room().pages) == [True, False, True]


@pytest.mark.parametrize("how", ["shorter", "longer", "much longer", "another page", "empty"])
def test_an_object_that_is_replaced_is_a_miss_and_heals(store, put, how):
    pages, other = Pages(count=3), Pages(count=3, seed=1)
    store.page_set(pages.keys, pages.sealed())
    good = pages.stored(1)
    bad = {
        "shorter": good[:-5], "longer": good + b"x", "much longer": good * 1000,
        "another page": other.stored(1), "empty": b"",
    }[how]  # fmt: skip
    put(pages.keys[1], bad)
    room = pages.room()
    assert store.page_get(pages.keys, room.pages) == [True, False, True]
    assert room.intact()
    assert store.batch_exists(pages.keys) == 1, "what was seen damaged still is there"
    until_well(store, pages)


@pytest.mark.parametrize("how", ["shorter", "longer", "empty"])
def test_damage_that_nobody_has_read_is_replaced_by_the_next_writer(store, put, how):
    pages = Pages(count=3)
    store.page_set(pages.keys, pages.sealed())
    good = pages.stored(1)
    put(pages.keys[1], {"shorter": good[:-5], "longer": good + b"x", "empty": b""}[how])
    assert store.page_set(pages.keys, pages.sealed()) == [True] * 3
    assert store.page_get(pages.keys, pages.room().pages) == [True] * 3


def test_foreign_objects_are_passed_over_and_stay(store, admin, prefix):
    pages = Pages(count=3)
    store.page_set(pages.keys, pages.sealed())
    names = bare(store)._names
    key = pages.keys[0]
    foreign = [
        "outside", f"{prefix}-next/{key}", f"{prefix}/readme.txt", f"{prefix}/zz/{key}",
        f"{prefix}/00/{key[:-1]}g", f"{prefix}/{key}", f"{prefix}/_l3/meta/A B", f"{prefix}/é/%20",
    ]  # fmt: skip
    for name in foreign:
        admin.put_object(Bucket="l3store", Key=name, Body=b"not ours")
    assert sorted(store.scan()) == sorted(pages.keys)
    assert [usage.pages for usage in store.usage()] == [3]
    assert store.list_meta() == []
    assert store.delete(pages.keys) == [True] * 3
    assert list(store.scan()) == []
    for name in foreign:
        answer = admin.get_object(Bucket="l3store", Key=name)
        assert answer["Body"].read() == b"not ours", name
    assert names.key(foreign[3]) is None


def test_a_server_that_comes_back_empty_is_misses_and_then_serves(url):
    with S3Server() as server:
        own = url.replace(url.partition("endpoint=")[2].partition("&client")[0], (
            f"{server.endpoint}&access_key={server.access_key}&secret_key={server.secret_key}"
        ))  # fmt: skip
        with registry.open(own) as store:
            pages = Pages(count=3)
            until_well(store, pages)
            server.restart(empty=True)
            until_answers = time.monotonic() + 20
            while True:
                try:
                    assert store.batch_exists(pages.keys) == 0
                    assert store.page_get(pages.keys, pages.room().pages) == [False] * 3
                    break
                except DOWN:
                    assert time.monotonic() < until_answers
                    time.sleep(0.05)
            shorter = Pages(count=3, size=1000)  # an empty store has no lengths
            until_well(store, shorter)
            behind_our_back(server).delete_bucket(Bucket="l3store")
            with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
                bare(store).page_set(shorter.keys, shorter.sealed())
            with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
                bare(store).page_get(shorter.keys, shorter.room().pages)


# -- deadlines -----------------------------------------------------------------------------------


def test_a_frozen_server_stores_no_foreign_bytes_when_it_goes_on(s3_server, url):
    """The caller reuses its pages as soon as the call has failed."""
    with registry.open(url) as store:  # its time-out, 5 s, is after the deadline: a copy is sent
        _freeze_while_it_writes(s3_server, store, seeds=(1, 2), deadline=0.2)
    with registry.open(url.replace("timeout=5s", "timeout=1s")) as store:  # the pages are lent
        _freeze_while_it_writes(s3_server, store, seeds=(3,), deadline=2.0)


def _freeze_while_it_writes(s3_server, store, seeds, deadline):
    until_well(store, Pages(count=1, size=1 << 20))
    for n in seeds:
        pages = Pages(count=3, size=1 << 20, seed=n)
        sealed = pages.sealed()
        s3_server.freeze()
        try:
            with call_deadline(deadline):
                failing(lambda: bare(store).page_set(pages.keys, sealed), within=deadline + 2)  # noqa: B023
            for segments in sealed:
                for piece in segments:
                    piece[:] = bytes(piece.nbytes)
        finally:
            s3_server.thaw()
        room = pages.room()
        time.sleep(0.2)
        done = bare(store).page_get(pages.keys, room.pages, page.opener(pages.keys))
        assert pages.wrong(done, room) == []
        read = bare(store).headers(pages.keys)
        assert [i for i in range(3) if read[i] not in (None, bytes(pages.stored(i)[:128]))] == []


def test_each_kind_of_call_ends_at_its_deadline_on_a_silent_network(s3_server, url):
    with Proxy(("127.0.0.1", s3_server.port)) as proxy:
        distant = url.replace(f":{s3_server.port}", f":{proxy.port}")
        with registry.open(distant, raw=True) as store:
            pages = Pages(count=40, size=2000)
            store.page_set(pages.keys, pages.sealed())
            proxy.freeze()
            for call in (
                lambda: store.batch_exists(pages.keys),
                lambda: store.exists_each(pages.keys),
                lambda: store.page_get(pages.keys, pages.room().pages),
                lambda: store.page_set(pages.keys, pages.sealed()),
                lambda: store.get_meta("a"),
                lambda: store.put_meta("a", b"x"),
                store.list_meta,
                lambda: list(store.scan()),
                store.usage,
                lambda: store.headers(pages.keys),
                lambda: store.delete(pages.keys),
                store.health,
            ):
                start = time.monotonic()
                with call_deadline(0.1), pytest.raises(BackendTimeout):
                    call()
                assert time.monotonic() - start < 1.5


# -- processes -----------------------------------------------------------------------------------


def _forked(store, url, client, answers):
    pages = Pages(count=2)
    try:
        store.batch_exists(pages.keys)
    except BackendUnavailable as error:
        answers.put(str(error))
    try:
        with registry.open(url) as own:
            answers.put(str(own.batch_exists(pages.keys)))
    except ConfigError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork with threads is the point
def test_a_forked_process_is_told_what_to_do(store, url, client):
    pages = Pages(count=2)
    store.page_set(pages.keys, pages.sealed())
    forks = multiprocessing.get_context("fork")
    answers = forks.SimpleQueue()
    child = forks.Process(target=_forked, args=(bare(store), url, client, answers), daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "open it anew" in answers.get()
    said = answers.get()
    assert said == "2" if client == "boto3" else "client=boto3" in said
    assert store.batch_exists(pages.keys) == 2
