"""The adapter's options: known before SGLang, torch or a store are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from l3store.adapters.sglang.options import ENGINE_OPTIONS, load
from l3store.config import STACK_OPTIONS, StoreURL
from l3store.errors import ConfigError

URL = "nvme:///mnt/l3?capacity=1GiB"


@pytest.mark.parametrize("module", ["options", "launch", "weights"])
def test_needs_neither_sglang_nor_torch(module):
    code = (
        "import sys\n"
        "for name in ('sglang', 'torch', 'numpy'): sys.modules[name] = None\n"
        f"import l3store.adapters.sglang.{module}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_names_what_it_lacks():
    import l3store.adapters.sglang

    with pytest.raises(AttributeError, match="'L3Store'; did you mean 'L3StoreHiCache'"):
        _ = l3store.adapters.sglang.L3Store


def test_only_the_url_is_needed():
    options = load({"url": URL})
    assert options.url == URL
    assert (options.tag, options.weights_revision, options.dtype, options.stages) == (None,) * 4
    assert options.log_interval == 60


def test_every_option_is_taken():
    options = load(
        {
            "url": URL, "tag": "blue", "weights_revision": "r1", "draft_revision": "r2",
            "dtype": "fp8_e4m3", "stages": [20, 16], "log_interval": "2min",
        }
    )  # fmt: skip
    assert (options.tag, options.weights_revision, options.draft_revision) == ("blue", "r1", "r2")
    assert (options.dtype, options.stages, options.log_interval) == ("fp8_e4m3", (20, 16), 120)


@pytest.mark.parametrize("extra", [None, {}, {"tag": "blue"}])
def test_without_a_url_the_message_shows_one(extra):
    with pytest.raises(ConfigError, match=r"'url' is missing, such as .*nvme:///"):
        load(extra)


@pytest.mark.parametrize("url", [["redis://:pw@h"], {"kv": "redis://:pw@h"}])
def test_a_url_that_is_no_text_is_not_shown(url):
    with pytest.raises(ConfigError, match=r"'url'.* is one text, not (list|dict)$") as told:
        load({"url": url})
    assert told.value.__cause__ is None


@pytest.mark.parametrize("name", sorted(ENGINE_OPTIONS - {"interface_v1"}))
def test_what_is_sglangs_is_left_to_it(name):
    assert load({"url": URL, name: "whatever"}) == load({"url": URL})


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"tags": "x"}, "unknown option 'tags'.*did you mean 'tag'"),
        ({"weight_revision": "x"}, "did you mean 'weights_revision'"),
        ({"capacity": "1GiB"}, "unknown option 'capacity'"),
        ({"stages": "20,16"}, r"option 'stages'.*such as \[20, 16\], not '20,16'"),
        ({"stages": 4}, r"such as \[20, 16\], not 4"),
        ({"stages": [20, "x"]}, "option 'stages'"),
        ({"tag": 7}, "option 'tag'"),
        ({"log_interval": "1 fortnight"}, "unknown unit 'fortnight'"),
        ({"log_interval": 0}, "'log_interval' must be positive"),
        ({"deadline": "fast"}, "option 'deadline'"),
        ({"deadline": -1}, "option 'deadline'"),
        ({"deadline": True}, r"option 'deadline' \(extra config of SGLang or its url\) = True"),
        ({"deadline": None}, "= None: None is not a duration"),
        ({"late": "stage"}, "option 'late'.*did you mean 'staged'"),
        ({"late": 1}, "option 'late'.*= 1: "),
        ({"breaker_failures": 1.5}, "option 'breaker_failures'.*= 1.5: "),
        ({"breaker_failures": True}, "option 'breaker_failures'.*= True: "),
        ({"breaker_failures": 0}, "'breaker_failures' must be positive"),
        ({"url": "/mnt/l3"}, "is not a store URL"),
        ({"url": "nvme:///mnt/l3?deadline=never"}, "option 'deadline'"),
        ({"url": 7}, "option 'url'"),
    ],
)
def test_a_wrong_option_is_named(extra, match):
    with pytest.raises(ConfigError, match=match):
        load({"url": URL, **extra})


@pytest.mark.parametrize("extra", [{"late": "pending"}, {"url": f"{URL}&late=pending"}])
def test_pending_is_refused_as_sglang_cannot_honour_it(extra):
    with pytest.raises(ConfigError, match=r"late=pending.*use late=wait or late=staged"):
        load({"url": URL, **extra})


def test_pending_is_refused_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("L3STORE_STACK_LATE", "pending")
    with pytest.raises(ConfigError, match="late=pending"):
        load({"url": URL})
    assert StoreURL.parse(load({"url": f"{URL}&late=wait"}).url).options["late"] == "wait"


def test_options_of_the_wrappers_move_into_the_url():
    options = load({"url": URL, "deadline": "250ms", "late": "staged", "breaker_failures": 5})
    assert StoreURL.parse(options.url).options == {
        "capacity": "1GiB", "deadline": "250ms", "late": "staged", "breaker_failures": "5",
    }  # fmt: skip


def test_they_move_into_a_url_without_options_as_well():
    assert load({"url": "file:///mnt/l3", "deadline": 2}).url == "file:///mnt/l3?deadline=2"


@pytest.mark.parametrize("name", sorted(STACK_OPTIONS))
def test_an_option_in_two_places_is_refused(name):
    value = "wait" if name == "late" else "3"
    with pytest.raises(ConfigError, match=f"'{name}' stands in the extra config and in its url"):
        load({"url": f"{URL}&{name}={value}", name: value})


def test_the_environment_gives_what_the_extra_config_leaves_out(monkeypatch):
    monkeypatch.setenv("L3STORE_SGLANG_TAG", "green")
    assert load({"url": URL}).tag == "green"
    assert load({"url": URL, "tag": "blue"}).tag == "blue"
    monkeypatch.setenv("L3STORE_SGLANG_TAGS", "x")
    with pytest.raises(ConfigError, match=r"unknown option 'tags'.*environment"):
        load({"url": URL})


def test_the_file_gives_what_is_in_neither(monkeypatch, tmp_path):
    (tmp_path / "l3.toml").write_text('[sglang]\ntag = "green"\nstages = [1, 2]\n')
    monkeypatch.setenv("L3STORE_CONFIG", str(tmp_path / "l3.toml"))
    assert (load({"url": URL}).tag, load({"url": URL}).stages) == ("green", (1, 2))


@pytest.mark.parametrize("interface", [0, 1, False, True])
def test_pages_move_in_place_or_are_copied(interface):
    assert load({"url": URL, "interface_v1": interface}) == load({"url": URL})


@pytest.mark.parametrize("name", ["tag", "weights_revision", "draft_revision", "dtype", "stages"])
def test_null_is_as_if_it_was_left_out(name):
    assert load({"url": URL, name: None}) == load({"url": URL})


def test_the_callers_mapping_is_not_changed():
    extra = {"url": URL, "deadline": "1s", "interface_v1": 1}
    before = dict(extra)
    load(extra)
    assert extra == before


@pytest.mark.parametrize("name", ["tag", "weights_revision", "dtype"])
def test_an_option_that_strayed_into_the_url_is_sent_back(name):
    with pytest.raises(ConfigError, match=f"{name!r} stands in the url: its place is the extra"):
        load({"url": f"{URL}&{name}=bfloat16"})


def test_an_option_of_the_store_beside_the_url_is_told_where_it_belongs():
    with pytest.raises(ConfigError, match=r"'capacity'.*options of the store stand in its url"):
        load({"url": "nvme:///mnt/l3", "capacity": "1GiB"})


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"dtype": "fp8"}, "unknown dtype 'fp8'.*did you mean 'fp8_e4m3'"),
        ({"stages": [2, 0]}, "stages must each be positive, such as 20,16, not 2,0"),
        ({"stages": []}, "stages must each be positive, such as 20,16, not none"),
        ({"tag": ""}, "option 'tag' is empty: leave it out"),
        ({"weights_revision": ""}, "option 'weights_revision' is empty"),
        ({"draft_revision": ""}, "option 'draft_revision' is empty"),
        ({"interface_v1": "0"}, "option 'interface_v1'.* must be 1, .*, not '0'"),
        ({"interface_v1": "1"}, "not '1'"),
        ({"interface_v1": 2}, "not 2"),
        ({"interface_v1": [1]}, r"not \[1\]"),
        ({"interface_v1": 1.0}, "not 1.0"),
        ({"interface_v1": None}, "not None"),
    ],
)
def test_a_value_that_no_engine_has_is_refused(extra, match):
    with pytest.raises(ConfigError, match=match):
        load({"url": URL, **extra})
