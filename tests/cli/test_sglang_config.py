"""sglang-config: what it prints is valid shell and valid JSON, and what it refuses says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from l3store import registry
from l3store.adapters.sglang import options
from l3store.adapters.sglang.launch import LAYOUTS, Launch, look_at_store
from l3store.cli import main
from l3store.errors import ConfigError

EXTRA = "--hicache-storage-backend-extra-config"


def run(url: object, *arguments: str, model: str = "Qwen/Qwen3-8B") -> Result:
    return CliRunner().invoke(main, ["sglang-config", str(url), "--model", model, *arguments])


def told(line: str) -> tuple[list[str], str]:
    """Returns the arguments that a shell gives to sglang, and the partition in its environment."""
    script = 'sglang() { printf "%s\\0" "${SGLANG_PP_LAYER_PARTITION-}" "$@"; }\n' + line
    env = {name: v for name, v in os.environ.items() if name != "SGLANG_PP_LAYER_PARTITION"}
    done = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, check=True, env=env
    )
    assert done.stderr == ""
    partition, *arguments = done.stdout.removesuffix("\0").split("\0")
    return arguments, partition


def flags(line: str) -> dict[str, str | None]:
    """Returns flag -> value of a line that a shell has read."""
    (command, *words), _ = told(line)
    assert command == "serve"
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found
            found[word] = None if after.startswith("--") else after
    return found


@pytest.fixture
def url(tmp_path) -> str:
    return f"nvme://{tmp_path}/store?capacity=2GiB&deadline=2s"


# -- what is printed ------------------------------------------------------------------------------


def test_the_line_is_all_on_standard_output_and_nothing_is_made(url, tmp_path):
    done = run(url, "--tp", "4", "--pp", "2")
    assert done.exit_code == 0
    assert flags(done.stdout) | {EXTRA: ""} == {
        "--model-path": "Qwen/Qwen3-8B",
        "--tp-size": "4",
        "--pp-size": "2",
        "--page-size": "64",
        "--enable-hierarchical-cache": None,
        "--hicache-write-policy": "write_through",
        "--hicache-mem-layout": "page_first",
        "--hicache-io-backend": "kernel",
        "--hicache-storage-backend": "dynamic",
        "--hicache-storage-prefetch-policy": "timeout",
        EXTRA: "",
    }
    lines = done.stdout.splitlines()
    assert len(lines) == 12  # one flag a line
    assert [line.endswith(" \\") for line in lines] == [True] * 11 + [False]
    assert "To see hits" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_json_is_what_sglang_and_the_adapter_read(url):
    done = run(url, "--json", "--tag", "blue", "--weights-revision", "r1", "--dtype", "fp8_e4m3",
               "--pp", "2", "--stages", "20,16")  # fmt: skip
    extra = json.loads(done.stdout)
    assert extra["interface_v1"] == 1
    assert extra["hicache_storage_pass_prefix_keys"] is True
    loaded = options.load(extra)
    assert (loaded.url, loaded.tag, loaded.weights_revision) == (url, "blue", "r1")
    assert (loaded.dtype, loaded.stages) == ("fp8_e4m3", (20, 16))


def test_the_json_stands_in_the_line_as_it_is(url):
    line, alone = run(url, "--tag", "a"), run(url, "--tag", "a", "--json")
    assert flags(line.stdout)[EXTRA] == alone.stdout.rstrip("\n")
    assert "To see hits" not in alone.stderr


def test_what_was_not_told_is_not_written(url):
    assert set(json.loads(run(url, "--json").stdout)) == {
        "backend_name", "module_path", "class_name", "interface_v1",
        "hicache_storage_pass_prefix_keys", "prefetch_threshold", "url",
    }  # fmt: skip


def test_the_class_that_is_named_is_there():
    extra = Launch(url="nvme:///x", model="m").extra_config()
    package = Path(options.__file__).parent / "hicache.py"
    assert extra["module_path"] == options.__name__.removesuffix(".options")
    assert f"class {extra['class_name']}(HiCacheStorage)" in package.read_text()


@pytest.mark.parametrize("text", ["it's", '"', "$HOME `id` $(id)", "a b\tc", "\\", "é\n!", "*"])
def test_the_shell_leaves_every_character_as_it_is(url, tmp_path, text):
    done = run(f"{url}&io=page", "--tag", text, model=f"/m/{text}")
    told_flags = flags(done.stdout)
    assert told_flags["--model-path"] == f"/m/{text}"
    assert json.loads(told_flags[EXTRA])["tag"] == text


@pytest.mark.parametrize(
    ("page_size", "threshold"), [(1, 256), (16, 256), (64, 256), (100, 300), (256, 256), (512, 512)]
)
def test_the_threshold_is_whole_pages(url, page_size, threshold):
    done = run(url, "--page-size", str(page_size), "--json")
    assert json.loads(done.stdout)["prefetch_threshold"] == threshold


@pytest.mark.parametrize(("layout", "io"), LAYOUTS.items())
def test_the_io_backend_follows_the_layout(url, layout, io):
    found = flags(run(url, "--layout", layout).stdout)
    assert (found["--hicache-mem-layout"], found["--hicache-io-backend"]) == (layout, io)


def test_stages_are_told_to_sglang_too(url):
    arguments, partition = told(run(url, "--pp", "3", "--stages", "9,8,7").stdout)
    assert partition == "9,8,7"
    assert json.loads(arguments[-1])["stages"] == [9, 8, 7]
    assert told(run(url, "--pp", "3").stdout)[1] == ""


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        (("--hicache-size", "300"), "--hicache-size", "300"),
        (("--hicache-ratio", "1.5"), "--hicache-ratio", "1.5"),
        (("--write-policy", "write_back"), "--hicache-write-policy", "write_back"),
        (("--prefetch-policy", "wait_complete"), "--hicache-storage-prefetch-policy",
         "wait_complete"),
    ],
)  # fmt: skip
def test_what_is_told_stands_in_the_line(url, arguments, flag, value):
    assert flags(run(url, *arguments).stdout)[flag] == value


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--layout", "page_frist"), "unknown layout 'page_frist'; did you mean 'page_first'?"),
        (("--layout", "page_first_kv_split"), "Known: layer_first, page_first, page_first_direct"),
        (("--prefetch-policy", "wait"), "did you mean 'wait_complete'?"),
        (("--write-policy", "writeback"), "did you mean 'write_back'?"),
        (("--dtype", "bf16"), "did you mean 'bfloat16'?"),
        (("--dtype", "uint8"), "unknown dtype 'uint8'"),
        (("--tp", "0"), "--tp"),
        (("--pp", "-1"), "--pp"),
        (("--page-size", "0"), "--page-size"),
        (("--hicache-size", "0"), "--hicache-size"),
        (("--hicache-ratio", "0"), "hicache_ratio must be a positive number, not 0"),
        (("--hicache-ratio", "nan"), "hicache_ratio must be a positive number, not nan"),
        (("--hicache-ratio", "2", "--hicache-size", "9"), "name one, not both"),
        (("--stages", "20,16"), "stages 20,16 are 2, but pp is 1; name 1, or pp 2"),
        (("--pp", "2", "--stages", "20"), "stages 20 are 1, but pp is 2"),
        (("--hicache-ratio", "inf"), "hicache_ratio must be a positive number, not inf"),
        (("--pp", "2", "--stages", "20,0"), "'20,0' are not layers of stages, such as 20,16"),
        (("--pp", "2", "--stages", "20-16"), "'20-16' are not layers of stages, such as 20,16"),
        (("--pp", "2", "--stages", ""), "'' are not layers of stages, such as 20,16"),
        (("--tag", ""), "option 'tag' is empty: leave it out"),
        (("--weights-revision", ""), "option 'weights_revision' is empty: leave it out"),
        (("--stages", "36",), "needs no naming"),
        (("--modle", "x"), "--model"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_told_with_the_nearest_right_one(url, arguments, match):
    done = run(url, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert match in done.stderr


def test_a_model_must_be_told(url):
    assert "model is empty" in run(url, model="").stderr
    done = CliRunner().invoke(main, ["sglang-config", url])
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("store", "match"),
    [
        ("/mnt/l3", "'/mnt/l3' is not a store URL"),
        ("nvm://{}/s", "unknown backend 'nvm'; did you mean 'nvme'?"),
        ("nvme://l3", "nvme://l3: a path begins with a slash: nvme:///l3"),
        ("file://data/l3", "file://data/l3: a path begins with a slash: file:///data/l3"),
        ("nvme://", "names no folder of its own"),
        ("file://{}/../b", "is not plain; did you mean"),
        ("nvme://{}/s?capcity=1GiB", "unknown option 'capcity' (URL of nvme); did you mean "
         "'capacity'?"),
        ("nvme://{}/s?capacity=1GIB", "did you mean 'GiB'?"),
        ("nvme://{}/s?capacity=2GiB&segment=1GiB", "less than four segments"),
        ("nvme://{}/s?capacity=1MiB", "less than four segments"),
        ("nvme://{}/s?writers=0", "option 'writers' must be positive"),
        ("nvme://{}/s?evict=swep", "did you mean 'sweep'?"),
        ("file://{}/s?workers=none", "option 'workers'"),
        ("nvme://{}/s?deadlin=1s", "did you mean 'deadline'?"),
        ("nvme://{}/s?deadline=0", "option 'deadline' must be positive"),
        ("nvme://{}/s?late=pending", "late=pending"),
        ("memory://", "memory:// lives in one process"),
        ("memory://?capacity=8GiB", "Name one that outlives it"),
        ("file://{}/s?mode=ro", "is no store yet, and its options forbid making it"),
        ("file://{}?mode=ro", "is no store yet, and its options forbid making it"),
    ],
)  # fmt: skip
def test_a_wrong_store_is_told_without_opening_one(tmp_path, store, match):
    done = run(store.format(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert match in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_on_the_way_is_told_before_there_is_a_store(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert f"did you mean '{tmp_path}/real/s'" in run(f"nvme://{tmp_path}/link/s").stderr


@pytest.mark.parametrize("scheme", ["file", "nvme"])
def test_what_is_there_and_no_such_store_is_told(tmp_path, scheme):
    (tmp_path / "notes.txt").touch()
    assert "is not a store" in run(f"{scheme}://{tmp_path}").stderr
    other = {"file": "nvme", "nvme": "file"}[scheme]
    with registry.open(f"{other}://{tmp_path}/s"):
        pass
    done = run(f"{scheme}://{tmp_path}/s")
    assert f"did you mean {other}://{tmp_path}/s?" in done.stderr


def test_a_store_that_is_there_is_looked_at_and_left_as_it_is(tmp_path):
    url = f"nvme://{tmp_path}/s?capacity=256MiB"
    with registry.open(url):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert run(url).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    done = run(f"nvme://{tmp_path}/s?capacity=1GiB")
    assert done.exit_code == 2
    assert "was made with 268435456" in done.stderr


# -- --check --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "nvme"])
def test_check_makes_the_store_and_asks_how_it_is(tmp_path, scheme):
    done = run(f"{scheme}://{tmp_path}/s", "--check", "--json")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "s" / "store.json").read_text())["kind"] == scheme


def test_check_finds_what_looking_does_not(tmp_path):
    url = f"nvme://{tmp_path}/absent/s"
    looked, checked = run(url), run(url, "--check")
    assert looked.exit_code == 0
    assert f"{tmp_path}/absent is not on this machine" in looked.stderr
    assert (checked.exit_code, checked.stdout) == (2, "")
    assert "cannot be created" in checked.stderr


# -- warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--page-size", "48"), "page_size 48 does not divide SGLang's chunks of prefill"),
        (("--page-size", "8"), "page_size 8: every page is an object of its own"),
        (("--layout", "layer_first"), "a page lies in a piece for each layer"),
        (("--layout", "page_head"), "without MLA only"),
        (("--prefetch-policy", "best_effort"), "takes what has arrived"),
        (("--tp", "4", "--pp", "2"), "writers=8 if all 8 ranks are on one; of a pure MLA model "
         "(DeepSeek) only one a stage writes: writers=2"),
        (("--model", "/absent/model"), "model /absent/model is not on this machine"),
        (("--tp", "2", "--hicache-size", "2"), "capacity of 2.1 GB: the host memory of all ranks "
         "holds 4 GB"),
    ],
)  # fmt: skip
def test_what_is_hardly_meant_is_warned_of_and_printed(url, arguments, match):
    done = run(url, *arguments)
    assert done.exit_code == 0
    assert match in done.stderr
    assert "warning" not in done.stdout


def test_nothing_is_warned_of_without_a_reason(url):
    for good in (url, f"{url}&writers=8"):
        done = run(good, *(("--tp", "8") if "writers" in good else ()), "--hicache-ratio", "2")
        assert "warning" not in done.stderr


def test_a_capacity_too_small_to_be_of_use_is_warned_of(tmp_path):
    """Of a store that is to come as the URL says it, of one that is there as it was made."""
    url = f"nvme://{tmp_path}/s?capacity=64MiB"
    assert "capacity of 67.1 MB: 455 tokens of Qwen3-8B" in run(url).stderr
    with registry.open(url):
        pass
    assert "455 tokens of Qwen3-8B" in run(f"nvme://{tmp_path}/s").stderr


def test_a_file_store_grows_without_end(tmp_path):
    assert "file:// evicts nothing" in run(f"file://{tmp_path}/s").stderr


def test_a_store_that_only_reads_is_warned_of():
    warnings = Launch(url="nvme:///mnt/l3?capacity=1GiB&mode=ro", model="m").warnings()
    assert any("nothing is backed up" in one for one in warnings)


def test_a_new_store_without_a_capacity_is_warned_of(tmp_path):
    found = look_at_store(Launch(url=f"nvme://{tmp_path}/store", model="m"))
    assert found == ["nvme without option 'capacity': a new store has 16 GiB"]


def test_a_capacity_that_the_drive_has_not_is_warned_of(tmp_path):
    (found,) = look_at_store(Launch(url=f"nvme://{tmp_path}/store?capacity=900TiB", model="m"))
    assert f"{tmp_path} has" in found


def test_a_folder_that_cannot_be_made_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    assert f"{tmp_path} cannot be written" in run(f"nvme://{tmp_path}/s?capacity=2GiB").stderr


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://me:sesame@cache:6379/0", "password"),
        ("redis://cache?password=sesame", "option 'password'"),
        ("redis://cache?sentinel=m&sentinel_password=sesame", "option 'sentinel_password'"),
        ("s3://bucket?access_key=a&secret_key=sesame", "option 'secret_key'"),
        ("s3://bucket?session_token=sesame", "option 'session_token'"),
    ],
)
def test_a_secret_is_warned_of_as_everybody_sees_the_line(url, what):
    warnings = Launch(url=url, model="m").warnings()
    assert any(f"the URL's {what} stands in the launch line" in one for one in warnings)
    assert not any("sesame" in one for one in warnings)


def test_an_open_url_is_not_warned_of():
    assert Launch(url="s3://bucket?endpoint=http://h&profile=p", model="m").warnings() == []


def test_a_store_elsewhere_is_not_opened(monkeypatch):
    """Its options are its backend's to check, which would connect to it."""

    class Elsewhere:
        @classmethod
        def from_url(cls, url):
            raise AssertionError("opened")

        @classmethod
        def check_url(cls, url):
            return False  # as backends do that say nothing of it

    monkeypatch.setattr(registry, "backend_class", lambda scheme: Elsewhere)
    (warning,) = look_at_store(Launch(url="s3://bucket/prefix?region=x", model="m"))
    assert "options of s3 are not checked: --check does" in warning


@pytest.mark.parametrize(
    "url",
    ["redis://nobody:1/0?window=1MiB", "s3://bucket/x?region=a", "mooncake://nobody:1?admin=1"],
)
def test_a_store_on_a_server_is_not_opened(url):
    assert look_at_store(Launch(url=url, model="m")) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://nobody:1/0?windo=1MiB", "did you mean 'window'"),
        ("redis://nobody:1/zero", "number of a database"),
        ("s3://bucket/x?adressing=path", "did you mean 'addressing'"),
        ("s3:///x", "bucket"),
        ("mooncake://nobody:1?adm=1", "did you mean 'admin'"),
        ("mooncake://nobody:1/x", "did you mean mooncake://nobody:1?prefix=x"),
    ],
)
def test_options_of_a_store_on_a_server_are_checked_without_it(url, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        look_at_store(Launch(url=url, model="m"))


# -- the library's own ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tp": 0}, "tp must be a positive number, not 0"),
        ({"pp": -1}, "pp must be a positive number, not -1"),
        ({"page_size": 0}, "page_size must be a positive number, not 0"),
        ({"hicache_size": -1}, "hicache_size must be a positive number, not -1"),
        ({"pp": 2, "stages": (36, 0)}, "stages must each be positive, such as 20,16, not 36,0"),
        ({"stages": ()}, "stages must each be positive, such as 20,16"),
    ],
)
def test_a_wrong_value_is_refused_without_the_command_too(fields, match):
    with pytest.raises(ConfigError, match=match):
        Launch(url="nvme:///mnt/l3", model="m", **fields)
