"""What a URL, the environment and a profile may say, and what is told when they are wrong."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import obstore
import pytest

from l3store import registry
from l3store.backends.s3.boto3_client import _models
from l3store.backends.s3.opening import connect
from l3store.backends.s3.options import S3Options, bucket_and_prefix
from l3store.config import StoreURL
from l3store.errors import ConfigError


@pytest.fixture(autouse=True)
def _nobody(monkeypatch, tmp_path):
    """No credentials of whoever runs the tests, and no machine's role is asked for."""
    for name in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION",
                 "DEFAULT_REGION", "ENDPOINT_URL", "ENDPOINT_URL_S3"):  # fmt: skip
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", "l3store"),
        ("s3://bucket/", "bucket", "l3store"),
        ("s3://my.bucket-1/a/b=c/", "my.bucket-1", "a/b=c"),
    ],
)
def test_bucket_and_prefix(text, bucket, prefix):
    assert bucket_and_prefix(StoreURL.parse(text)) == (bucket, prefix)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3:///prefix", "no bucket name"),
        ("s3://ab", "no bucket name"),
        ("s3://bucket:9000/x", "option 'endpoint'"),
        ("s3://key:secret@bucket/x", "environment"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/a/../b", "prefix"),
        ("s3://bucket/a%20b", "prefix"),
        ("s3://bucket/x?endpoint=127.0.0.1:9000", "not a server's address"),
        ("s3://bucket/x?endpoint=http://h:9000/bucket", "the bucket stands in the URL"),
        ("s3://bucket/x?endpoint=http://h:port", "not a server's address"),
        ("s3://bucket/x?endpoint=http://u:pw@h:9000", "'http://***@h:9000' is not"),
        (
            "s3://bucket/x?access_key=a&secret_key=b&addressing=virtual&endpoint=http://127.0.0.1:1",
            "addressing=path",
        ),
        ("s3://bucket/x?adressing=path", "did you mean 'addressing'"),
        ("s3://bucket/x?addressing=pth", "did you mean 'path'"),
        ("s3://bucket/x?client=boto", "did you mean 'boto3'"),
        ("s3://bucket/x?retries=2", "0 to 1"),
        ("s3://bucket/x?fanout=5", "0 to 4"),
        ("s3://bucket/x?concurrency=0", "positive"),
        ("s3://bucket/x?timeout=0s", "positive"),
        ("s3://a..b/x", "no bucket name"),
        ("s3://10.0.0.1/x", "no bucket name"),
        ("s3://bucket/x?timeout=999999999999h", "at most 8760h"),
        ("s3://bucket/x?connect_timeout=999999999999h", "at most 8760h"),
        ("s3://bucket/x?endpoint=http://h:9000%23x", "not a server's address"),
        ("s3://bucket/x?access_key=&secret_key=", "'access_key' is empty"),
        ("s3://bucket/x?access_key=a", "together"),
        ("s3://bucket/x?session_token=a", "needs 'access_key'"),
        ("s3://bucket/x?access_key=a&secret_key=b&profile=c", "give one"),
        ("s3://bucket/x?client=boto3&checksum=crc64nvme", "client=boto3"),
        ("s3://bucket/x?access_key=a&secret_key=b&ca_bundle=/nowhere.pem", "nowhere.pem"),
        ("s3://bucket/x?profile=nobody", "nobody"),
        ("s3://bucket/x", "no credentials"),
    ],
)
def test_mistakes_are_told(text, says):
    with pytest.raises(ConfigError) as caught:
        registry.open(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("client", ["obstore", "boto3"])
def test_a_profile_of_the_environment_that_is_not_there_is_told(monkeypatch, client):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    _models.cache_clear()
    with pytest.raises(ConfigError, match="nobody"):
        registry.open(f"s3://bucket/x?client={client}")


def test_a_secret_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        registry.open("s3://bucket/x?access_key=a&secret_key=sesame&profile=c")
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        registry.open("s3://key:sesame@bucket/x")
    assert "sesame" not in str(caught.value)
    options = S3Options(access_key="shown", secret_key="sesame", session_token="sesame")
    assert "sesame" not in repr(options)
    assert "access_key='shown', secret_key=..., session_token=..., client=" in repr(options)


def test_the_endpoint_is_the_options_then_the_environments_then_the_profiles(monkeypatch, tmp_path):
    (tmp_path / "CONFIG_FILE").write_text(
        "[profile work]\nendpoint_url = http://profile:1\nregion = eu-west-3\n"
        "aws_access_key_id = a\naws_secret_access_key = b\n"
    )
    given = S3Options(profile="work")
    assert connect("bucket", given).endpoint == "http://profile:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    assert connect("bucket", given).endpoint == "http://all:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1/")
    assert connect("bucket", given).endpoint == "http://s3:1"
    told = S3Options(profile="work", endpoint="http://told:1")
    assert connect("bucket", told).endpoint == "http://told:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "s3:1")
    with pytest.raises(ConfigError, match="environment AWS_ENDPOINT_URL_S3 = 's3:1'"):
        connect("bucket", given)


def test_without_an_endpoint_it_is_aws_in_the_region_that_is_told(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert connect("bucket", S3Options(region="eu-west-3")).endpoint == (
        "https://s3.eu-west-3.amazonaws.com"
    )
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-1")  # or a profile's: that comes later
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert connect("bucket", S3Options()).endpoint == "https://s3.eu-north-1.amazonaws.com"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"region": "eu-west-3"}, "https://bucket.s3.eu-west-3.amazonaws.com/p/x"),
        ({"region": "eu-west-3", "addressing": "path"},
         "https://s3.eu-west-3.amazonaws.com/bucket/p/x"),
        ({"endpoint": "https://h:9000"}, "https://h:9000/bucket/p/x"),
        ({"endpoint": "https://h:9000", "addressing": "virtual"}, "https://bucket.h:9000/p/x"),
    ],
)  # fmt: skip
def test_both_libraries_ask_at_one_address(given, address):
    found = connect("bucket", S3Options(access_key="a", secret_key="b", **given))
    by_obstore = obstore.sign(found.client._store, "GET", "p/x", timedelta(minutes=1))
    wanted = {"Bucket": "bucket", "Key": "p/x"}
    by_boto3 = found.tools._s3.generate_presigned_url("get_object", Params=wanted)
    assert by_obstore.partition("?")[0] == by_boto3.partition("?")[0] == address


def test_a_library_that_is_missing_is_named():
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from l3store import registry\n"
        "try: registry.open('s3://bucket')\n"
        "except registry.ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "boto3 is not installed: pip install 'l3store[s3]'" in done.stdout, done.stderr
