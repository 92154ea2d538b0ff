"""The launch line of ``l3store sglang-config``, read by SGLang's own parser and resolved by it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import os
import shlex
import shutil

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs, prepare_server_args

from l3store.adapters.sglang import options
from l3store.adapters.sglang.launch import (
    LAYOUTS,
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    Launch,
)

URL = "nvme:///mnt/l3?capacity=1GiB&deadline=2s"


def split(line):
    """As a shell does, which shlex does not know to join lines for."""
    return shlex.split(line.replace("\\\n", ""))


@pytest.fixture
def read(model, monkeypatch):
    """Gives what SGLang makes of a line, all options resolved."""
    # Reading arguments sets log handlers and variables for the whole process.
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    before = dict(os.environ)

    def make(**wanted):
        words = split(Launch(**{"url": URL, "model": str(model)} | wanted).line())
        assert words[:2] == ["sglang", "serve"]
        args = prepare_server_args([*words[2:], "--device", "cpu"])
        args.resolve_once()
        return resolving_view(args)

    yield make
    os.environ.clear()
    os.environ.update(before)


def choices(field):
    """Returns what SGLang's command line takes for an option."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (action,) = [action for action in parser._actions if action.dest == field]
    return set(action.choices)


def test_every_flag_is_sglangs_and_means_what_it_should(read, model, tmp_path):
    spaced = shutil.copytree(model, tmp_path / "it's a model")
    seen = read(model=str(spaced), tp=4, pp=2, page_size=32, hicache_size=100)
    assert seen.model_path == str(spaced)
    assert (seen.tp_size, seen.pp_size, seen.page_size) == (4, 2, 32)
    assert seen.enable_hierarchical_cache is True
    assert seen.hicache_size == 100
    assert seen.hicache_storage_backend == "dynamic"
    assert read(hicache_ratio=1.5).hicache_ratio == 1.5


@pytest.mark.parametrize(("layout", "io"), LAYOUTS.items())
def test_sglang_keeps_layout_and_io_backend(read, layout, io):
    seen = read(layout=layout)
    assert (seen.hicache_mem_layout, seen.hicache_io_backend) == (layout, io)


@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
def test_prefetch_policies(read, policy):
    assert read(prefetch_policy=policy).hicache_storage_prefetch_policy == policy


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_write_policies(read, policy):
    assert read(write_policy=policy).hicache_write_policy == policy


def test_we_know_all_that_sglang_knows():
    """A new layout or policy is one to support, or to leave out on purpose."""
    assert choices("hicache_storage_prefetch_policy") == set(PREFETCH_POLICIES)
    assert choices("hicache_write_policy") == set(WRITE_POLICIES)
    ascend_only = {"page_first_kv_split"}
    assert choices("hicache_mem_layout") == set(LAYOUTS) | ascend_only
    no_logical_dtype = {"auto", "bf16", "mxfp8"}  # the model's, bfloat16's, and one we refuse
    assert choices("kv_cache_dtype") <= set(options.DTYPES) | no_logical_dtype


def test_the_defaults_are_sglangs(read):
    plain = read()
    theirs = resolving_view(prepare_server_args(["--model-path", "m"]))
    for name in ("hicache_mem_layout", "hicache_io_backend", "hicache_write_policy",
                 "hicache_storage_prefetch_policy"):  # fmt: skip
        assert getattr(plain, name) == getattr(theirs, name), name


@pytest.mark.parametrize("as_file", [False, True])
def test_the_extra_config_is_parted_as_we_expect(read, tmp_path, as_file):
    text = read(tag="blue", page_size=100).hicache_storage_backend_extra_config
    if as_file:
        (tmp_path / "l3.json").write_text(text)
        text = f"@{tmp_path}/l3.json"
    extra, threshold, _, _, prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
        text
    )
    assert (threshold, prefix_keys) == (300, True)
    assert extra["interface_v1"] == 1
    loaded = options.load(extra)
    assert (loaded.url, loaded.tag) == (URL, "blue")


def test_the_class_that_is_named_can_be_loaded():
    extra = Launch(url=URL, model="m").extra_config()
    named = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])
    assert named.__name__ == "L3StoreHiCache"


def test_sglang_cuts_the_stages_as_they_were_told(monkeypatch):
    line = Launch(url=URL, model="m", pp=3, stages=(9, 8, 7)).line()
    name, _, value = split(line)[0].partition("=")
    monkeypatch.setenv(name, value)
    assert [get_pp_indices(24, rank, 3) for rank in range(3)] == [(0, 9), (9, 17), (17, 24)]
    with pytest.raises(ValueError, match="does not match"):
        get_pp_indices(25, 0, 3)


def test_the_program_has_the_command(monkeypatch, capsys):
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="sglang")
    monkeypatch.setattr("sys.argv", ["sglang", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.load()()
    assert "serve" in capsys.readouterr().out
