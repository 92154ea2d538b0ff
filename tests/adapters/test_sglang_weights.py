"""The fingerprint of weights: equal for equal files wherever they lie, another for others."""

from __future__ import annotations

import os
import random

import pytest

from l3store.adapters.sglang.weights import fingerprint

LENGTH = 300_000  # small enough to be read whole


def weights(path, *, seed=0, shards=2, config='{"rope_theta": 1}'):
    path.mkdir()
    noise = random.Random(seed)
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        (path / name).write_bytes(noise.randbytes(LENGTH + i))
    (path / "config.json").write_text(config)
    return path


def change(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_same_files_elsewhere_have_the_same(tmp_path):
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    os.utime(other / "config.json", (1, 1))
    (other / "README.md").write_text("what is no weight does not count")
    (other / "original").mkdir()
    (other / "original" / "consolidated.pth").write_bytes(b"nor what lies deeper")
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 20


def test_a_link_counts_as_what_it_leads_to(tmp_path):
    """The hub's cache is a folder of links."""
    real = weights(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in real.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert fingerprint(tmp_path / "snapshot") == fingerprint(real)


def test_other_weights_have_another(tmp_path):
    assert fingerprint(weights(tmp_path / "a")) != fingerprint(weights(tmp_path / "b", seed=1))


@pytest.mark.parametrize("at", [0, 4095, LENGTH // 16, LENGTH * 15 // 16 + 1, LENGTH - 1])
def test_one_byte_of_a_small_file_makes_another(tmp_path, at):
    path = weights(tmp_path / "a")
    before = fingerprint(path)
    change(path / "model-00001-of-00002.safetensors", at)
    assert fingerprint(path) != before


@pytest.mark.parametrize("seed", range(5))
def test_a_matrix_of_a_large_file_makes_another(tmp_path, seed):
    """4,096 blocks over 256 MiB: one in each 64 KiB, so no matrix of 128 KiB changes unseen."""
    path, at = tmp_path / "model.safetensors", random.Random(seed).randrange(255 << 20)
    with path.open("wb") as file:
        file.truncate(256 << 20)
    before = fingerprint(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1" * (128 << 10))
    assert fingerprint(path) != before


def test_the_configuration_counts(tmp_path):
    """The same weights under another rope scaling make other KV."""
    one = weights(tmp_path / "a")
    other = weights(tmp_path / "b", config='{"rope_theta": 2}')
    assert fingerprint(one) != fingerprint(other)
    (other / "config.json").unlink()
    assert fingerprint(one) != fingerprint(other)


def test_shards_in_another_order_are_others(tmp_path):
    path = weights(tmp_path / "a")
    before = fingerprint(path)
    first, second = sorted(path.glob("*.safetensors"))
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)
    assert fingerprint(path) != before


def test_where_one_shard_ends_and_the_next_begins_counts(tmp_path):
    for name, cut in (("a", 10), ("b", 20)):
        (tmp_path / name).mkdir()
        data = bytes(range(30))
        (tmp_path / name / "1.bin").write_bytes(data[:cut])
        (tmp_path / name / "2.bin").write_bytes(data[cut:])
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt", "pth", "gguf"])
def test_each_kind_of_weights_is_seen(tmp_path, suffix):
    (tmp_path / f"model.{suffix}").write_bytes(b"weights")
    assert fingerprint(tmp_path) is not None


def test_a_single_file_is_a_model_too(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    before = fingerprint(file)
    change(file, 3)
    assert fingerprint(file) != before


def test_an_empty_shard_is_not_none(tmp_path):
    (tmp_path / "1.bin").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "2.bin").touch()
    assert fingerprint(tmp_path) != before


def test_without_weights_there_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) is None
    assert fingerprint(tmp_path / "absent") is None


def test_weights_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "model.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path)
