"""Store URLs, sizes, durations, and which of four places an option comes from."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from l3store.config import (
    Duration,
    Size,
    StackOptions,
    StoreURL,
    load_options,
    parse_duration,
    parse_size,
)
from l3store.errors import ConfigError


class Options(msgspec.Struct, frozen=True, kw_only=True):
    capacity: Size = Size(1)
    wait: Duration = Duration(1)
    mode: Literal["a", "bcd"] = "a"
    workers: int = 4
    sync: bool = False


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KiB", 65536), ("200GiB", 200 << 30), ("1.5MB", 1_500_000), ("0", 0),
     ("2 TiB", 2 << 40), (7, 7)],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("200GIB", "did you mean 'GiB'"),
        ("64KiBB", "KiB"),
        ("-1", "not a size"),
        ("", "not a size"),
        ("1e9", "not a size"),
        ("nan", "not a size"),
        (True, "not a size"),
        ("0.5", "whole number"),
    ],
)
def test_a_bad_size_names_the_nearest_unit(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("2min", 120), (3, 3)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


def test_a_bad_duration_names_the_nearest_unit():
    with pytest.raises(ConfigError, match="did you mean 'min'"):
        parse_duration("5mins")


def test_a_url_in_all_its_parts():
    url = StoreURL.parse("redis://user:p%40ss@h:6379/0/a%20b?x=1&y=%2F")
    assert (url.scheme, url.host, url.port, url.path) == ("redis", "h", 6379, "/0/a b")
    assert (url.username, url.password, url.options) == ("user", "p@ss", {"x": "1", "y": "/"})


def test_a_password_is_never_shown():
    url = StoreURL.parse("redis://user:secret@h/0?token=hidden")
    for shown in (str(url), repr(url)):
        assert "secret" not in shown
        assert "hidden" not in shown


@pytest.mark.parametrize(
    "text",
    ["redis://user:secret@h:99999999/0", "redis://u:secret/x@h", "redis://u:secret#x@h",
     "redis://u:x?secret@h", "redis://u:x@secret@h:port", "redis://:secret@[h", "redis:/u:secret@h",
     "u:secret@h:6379", "redis:u:secret@h", "s3:/b?key=secret", "s3://b?key=secret&x=1&x=2",
     "s3://b?key=secret#x", "s3://b:port?key=secret", "s3:/b?x=\n&key=secret"],
)  # fmt: skip
def test_a_password_is_not_shown_where_the_url_is_wrong(text):
    with pytest.raises(ConfigError) as caught:
        StoreURL.parse(text)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "match"),
    [("/mnt/l3", "must be scheme://"), ("file:/mnt", "must be scheme://"), ("", "scheme"),
     ("s3://b?x=1&x=2", "'x' stands twice"), ("file:///a#b", "%23"),
     ("s3://h:port/", "port is 0 to 65535"), ("file:///a%00b", "zero byte")],
)  # fmt: skip
def test_a_bad_url_says_what_is_wrong(text, match):
    with pytest.raises(ConfigError, match=match):
        StoreURL.parse(text)


def test_a_secret_of_another_type_is_not_shown(monkeypatch, tmp_path):
    class Secrets(msgspec.Struct):
        password: str = ""

    (tmp_path / "c.toml").write_text("[demo]\npassword = 12345\n")
    monkeypatch.setenv("L3STORE_CONFIG", str(tmp_path / "c.toml"))
    with pytest.raises(ConfigError, match="'password'") as caught:
        load_options(Secrets, "demo", {})
    assert "12345" not in str(caught.value)


def test_precedence_is_url_then_environment_then_file_then_default(monkeypatch, tmp_path):
    path = tmp_path / "l3store.toml"
    path.write_text('[demo]\ncapacity = "1KiB"\nworkers = 9\nmode = "bcd"\n[other]\nx = 1\n')
    monkeypatch.setenv("L3STORE_CONFIG", str(path))
    monkeypatch.setenv("L3STORE_DEMO_CAPACITY", "2KiB")
    monkeypatch.setenv("L3STORE_DEMO_WORKERS", "8")
    found = load_options(Options, "demo", {"capacity": "3KiB"})
    assert (found.capacity, found.workers, found.mode, found.wait) == (3072, 8, "bcd", 1.0)


@pytest.mark.parametrize("place", ["url", "environment", "file"])
def test_an_unknown_option_is_named_with_its_place_and_the_nearest(monkeypatch, tmp_path, place):
    given = {}
    if place == "url":
        given = {"capcity": "1"}
    elif place == "environment":
        monkeypatch.setenv("L3STORE_DEMO_CAPCITY", "1")
    else:
        (tmp_path / "c.toml").write_text("[demo]\ncapcity = 1\n")
        monkeypatch.setenv("L3STORE_CONFIG", str(tmp_path / "c.toml"))
    where = {"url": "URL of demo", "environment": "L3STORE_DEMO_", "file": "c.toml"}[place]
    with pytest.raises(ConfigError, match=r"'capcity'.*did you mean 'capacity'") as caught:
        load_options(Options, "demo", given)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [("mode", "bc", "did you mean 'bcd'"), ("workers", "x", "'workers'"), ("sync", "maybe", "sync"),
     ("capacity", "3XB", "unknown unit")],
)  # fmt: skip
def test_a_bad_value_names_its_option(name, value, match):
    with pytest.raises(ConfigError, match=match):
        load_options(Options, "demo", {name: value})


def test_a_configuration_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("L3STORE_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_options(Options, "demo", {})
    (tmp_path / "bad.toml").write_text("[demo\n")
    monkeypatch.setenv("L3STORE_CONFIG", str(tmp_path / "bad.toml"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_options(Options, "demo", {})


@pytest.mark.parametrize("name", ["deadline", "breaker_cooldown", "breaker_max_cooldown"])
def test_stack_options_have_an_end(name):
    with pytest.raises(ConfigError, match=rf"'{name}' is at most 8760h"):
        load_options(StackOptions, "stack", {name: "9999999999s"})


@pytest.mark.parametrize(
    "name", ["deadline", "breaker_failures", "breaker_cooldown", "breaker_max_cooldown"]
)
def test_stack_options_must_be_positive(name):
    with pytest.raises(ConfigError, match=name):
        load_options(StackOptions, "stack", {name: "0"})


def test_an_option_of_the_wrappers_in_another_section_names_its_own(monkeypatch):
    monkeypatch.setenv("L3STORE_DEMO_DEADLINE", "2s")
    with pytest.raises(ConfigError, match=r"belongs to section 'stack'.*L3STORE_STACK_DEADLINE"):
        load_options(Options, "demo", {})


def test_a_bad_value_is_shown():
    with pytest.raises(ConfigError, match=r"'workers'.*= 'many'"):
        load_options(Options, "demo", {"workers": "many"})
