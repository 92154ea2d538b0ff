"""Replaying: the right counts, every byte checked, and nothing wrong goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from dataclasses import replace as changed
from itertools import islice

import pytest
from click.testing import CliRunner

from l3store import registry
from l3store.backends.memory import MemoryBackend, MemoryOptions
from l3store.cli import main
from l3store.config import Size
from l3store.replay import read_trace, replay, synthetic_trace
from l3store.replay.engine import Percentiles, page_hashes
from l3store.replay.payload import Payloads
from l3store.wrap import Verify
from l3store.wrap._base import Wrapper

KEYS = {"requests", "pages", "hit_pages", "set_pages", "evicted_pages", "hit_share",
        "mismatched_pages", "read_bytes", "written_bytes", "seconds", "cpu_seconds"}  # fmt: skip


def _run(*arguments):
    done = CliRunner().invoke(main, ["replay", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_first_1000_requests_of_the_real_trace(real_trace, tmp_path, scheme):
    """The page size does not change the counts; 64 KiB is what `make run` uses."""
    url = "memory://?capacity=2GiB" if scheme == "memory" else f"file://{tmp_path}/store"
    code, out, _ = _run(real_trace, "--url", url, "--requests", 1000, "--page-bytes", "4KiB",
                        "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found.keys() >= KEYS
    assert (found["set_pages"], found["hit_pages"], found["mismatched_pages"]) == (21_514, 5_791, 0)
    assert (found["requests"], found["pages"], found["evicted_pages"]) == (1000, 27_305, 0)
    assert found["written_bytes"] == 21_514 * 4096
    assert found["read_bytes"] == 5_791 * 4096
    assert found["seconds"] > 0
    assert found["cpu_seconds"] > 0


def test_the_whole_real_trace_has_its_hit_share(real_trace):
    """288,500 pages of 4 KiB over memory."""
    with real_trace.open("rb") as lines, MemoryBackend() as store:
        result = replay(Verify(store), read_trace(lines), page_bytes=4096)
    assert result.requests == 12_031
    assert round(result.hit_share, 4) == 0.3664
    assert (result.set_pages, result.mismatched_pages) == (182_790, 0)


class Swapping(Wrapper):
    """Gives the third page of every batch in place of the second, both whole."""

    def page_get(self, keys, into, check=None):
        keys = list(keys)
        if len(keys) > 2:
            keys[1] = keys[2]
        return super().page_get(keys, into)


class Flipping(Wrapper):
    def page_get(self, keys, into, check=None):
        done = super().page_get(keys, into)
        into[0][1][4095] ^= 1
        return done


class SkippingTheBuffer(Wrapper):
    """Calls everything read and writes nothing."""

    def page_get(self, keys, into, check=None):
        return [True] * len(keys)


@pytest.mark.parametrize("broken", [Swapping, Flipping, SkippingTheBuffer])
def test_wrong_bytes_are_counted(broken):
    with MemoryBackend() as store:
        result = replay(broken(store), synthetic_trace(1, 60), page_bytes=8192)
    assert result.mismatched_pages > 0


def test_a_mismatch_exits_with_1(monkeypatch):
    real = registry.open
    monkeypatch.setattr(registry, "open", lambda url: Flipping(real(url, raw=True)))
    code, out, _ = _run("--synthetic", 1, "--url", "memory://", "--requests", 50, "--json")
    assert code == 1
    assert json.loads(out)["mismatched_pages"] > 0


def test_below_verification_damage_is_a_failed_page_and_is_stored_again():
    with MemoryBackend() as store:
        requests = list(synthetic_trace(1, 40))
        first = replay(Verify(store), requests, page_bytes=4096)
        damaged = list(store._pages)[::7]
        for key in damaged:
            store._pages[key] = store._pages[key][:-1] + b"\0"
        second = replay(Verify(store), requests, page_bytes=4096)
    assert second.mismatched_pages == 0
    assert second.failed_pages == second.set_pages == len(damaged)
    assert second.hit_pages + second.set_pages == first.pages


def test_evicted_pages_are_those_stored_and_gone():
    with MemoryBackend(MemoryOptions(capacity=Size(200 * (4096 + 128)))) as store:
        result = replay(store, synthetic_trace(1, 200), page_bytes=4096)
        present = sum(usage.pages for usage in store.usage())
    assert result.evicted_pages == result.set_pages - present > 0
    assert result.mismatched_pages == 0


def test_a_store_that_is_full_is_told_and_no_error():
    options = MemoryOptions(capacity=Size(50 * (4096 + 128)), evict="none")
    with MemoryBackend(options) as store:
        result = replay(store, synthetic_trace(1, 30), page_bytes=4096)
    assert result.set_pages == 50
    assert result.not_stored_pages > 0


def test_a_second_replay_hits_everything(tmp_path):
    with registry.open(f"file://{tmp_path}/store") as store:
        first = replay(store, synthetic_trace(1, 30), page_bytes=4096)
        second = replay(store, synthetic_trace(1, 30), page_bytes=4096)
        other = replay(store, synthetic_trace(1, 30), page_bytes=4096, seed=1)
    assert first.set_pages > 0
    assert (second.set_pages, second.hit_share) == (0, 1.0)
    assert other.set_pages == first.set_pages, "another seed means other pages"


def test_batches_are_cut_to_size():
    asked = []

    class Counting(Wrapper):
        def page_set(self, keys, pages):
            asked.append(len(keys))
            return super().page_set(keys, pages)

    with MemoryBackend() as store:
        replay(Counting(store), islice(synthetic_trace(1, 100), 100), page_bytes=64, batch=16)
    assert max(asked) == 16


def test_a_store_that_takes_few_keys_is_asked_for_few():
    class Few(Wrapper):
        """Refuses more than eight keys, as a backend with this `max_batch` does."""

        def __init__(self, inner):
            super().__init__(inner)
            self.capabilities = changed(inner.capabilities, max_batch=8)

        def batch_exists(self, keys):
            return super().batch_exists(self._few(keys))

        def exists_each(self, keys):
            return super().exists_each(self._few(keys))

        def page_get(self, keys, into, check=None):
            return super().page_get(self._few(keys), into)

        def page_set(self, keys, pages):
            return super().page_set(self._few(keys), pages)

        def _few(self, keys):
            if len(keys) > 8:
                raise ValueError(f"{len(keys)} keys, at most 8")
            return keys

    with MemoryBackend() as few, MemoryBackend() as many:
        asked_in_parts = replay(Few(few), synthetic_trace(1, 100), page_bytes=64)
        at_once = replay(many, synthetic_trace(1, 100), page_bytes=64)
    counts = ("pages", "hit_pages", "set_pages", "evicted_pages", "mismatched_pages")
    assert [getattr(asked_in_parts, name) for name in counts] == [
        getattr(at_once, name) for name in counts
    ]
    assert asked_in_parts.exists.calls > at_once.exists.calls


def test_page_hashes_are_framed_so():
    """A store outlives the version that wrote it: replayed again it must hit."""
    want = [hashlib.sha256(b"l3store.replay.1" + struct.pack("<qq", -3, i)).digest()
            for i in (0, 1, -(2**63))]  # fmt: skip
    assert page_hashes(-3, (0, 1, -(2**63))) == tuple(want)


def test_percentiles_are_of_nearest_rank():
    """The smallest time that at least so many of a hundred calls do not exceed."""
    hundred = Percentiles.of([i / 1000 for i in range(100, 0, -1)])
    assert hundred == Percentiles(100, 50.0, 95.0, 99.0)
    assert Percentiles.of([0.001, 0.002]) == Percentiles(2, 1.0, 2.0, 2.0)
    assert Percentiles.of([]) == Percentiles(0, 0.0, 0.0, 0.0)


def test_payloads_tell_pages_and_blocks_apart():
    payloads, one, two = (
        Payloads(16384, 0),
        memoryview(bytearray(16384)),
        memoryview(bytearray(16384)),
    )
    payloads.write(bytes(32), one)
    payloads.write(bytes(31) + b"\1", two)
    for at in range(0, 16384, 4096):
        assert one[at : at + 4096] != two[at : at + 4096], "pages differ in every 4 KiB"
    swapped = bytes(one[4096:8192]) + bytes(one[:4096]) + bytes(one[8192:])
    assert payloads.matches(bytes(32), one)
    assert not payloads.matches(bytes(32), memoryview(swapped))
    assert not payloads.matches(bytes(32), two)
    payloads.poison(one)
    assert not payloads.matches(bytes(32), one)


def test_the_table_shows_what_json_does():
    code, out, _ = _run("--synthetic", 1, "--url", "memory://", "--requests", 20)
    assert code == 0
    for word in ("requests", "hit share", "mismatched pages", "GB/s", "s/GB", "p50 / p95 / p99"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--url", "memory://"], "name a TRACE"),
        (["--synthetic", "1", "--url", "memry://"], "did you mean 'memory'"),
        (["--synthetic", "1", "--url", "memory://", "--page-bytes", "64KIB"], "did you mean 'KiB'"),
        (["--synthetic", "1", "--url", "memory://", "--page-bytes", "0"], "not positive"),
        (["--synthetic", "1", "--url", "memory://", "--page-bytes", "1PB"], "fit in memory"),
        (["--synthetic", "1", "--url", "memory://", "--seed", str(2**63)], "--seed"),
        (["absent.jsonl", "--url", "memory://"], "absent.jsonl"),
    ],
)
def test_bad_input_is_told_on_one_line_with_exit_code_2(arguments, match):
    code, _, err = _run(*arguments)
    assert code == 2
    assert match in err
    assert "Traceback" not in err


def test_pages_too_large_for_the_store_are_refused_with_the_largest(tmp_path):
    url = f"nvme://{tmp_path}/store?capacity=64MiB"
    code, _, err = _run("--synthetic", "1", "--url", url, "--page-bytes", "16MiB")
    assert code == 2
    assert "the largest is 16769024" in err


def test_a_bad_trace_line_stops_or_is_counted(tmp_path):
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace.write_text(good + "{nonsense\n" + good)
    code, _, err = _run(trace, "--url", "memory://", "--page-bytes", "4KiB")
    assert (code, "trace line 2: not JSON" in err) == (2, True)
    code, out, err = _run(
        trace, "--url", "memory://", "--skip-bad", "--json", "--page-bytes", "4KiB"
    )
    found = json.loads(out)
    assert (code, found["requests"], found["bad_lines"], found["hit_pages"]) == (0, 2, 1, 2)
    assert "left out: trace line 2" in err


def test_a_trace_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}\n'
    writer = threading.Thread(target=pipe.write_bytes, args=(line * 3,), daemon=True)
    writer.start()
    code, out, _ = _run(pipe, "--url", "memory://", "--page-bytes", "4KiB", "--json")
    writer.join(10)
    assert (code, json.loads(out)["requests"]) == (0, 3)


def test_a_password_in_the_url_is_not_shown():
    for more in ([], ["--json"]):
        code, out, _ = _run("--synthetic", 1, "--requests", 2, *more,
                            "--url", "memory://someone:secret@/?capacity=1GiB")  # fmt: skip
        assert (code, "secret" in out) == (0, False)
