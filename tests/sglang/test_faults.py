"""What the engine sees when the store fails: misses, in bounded time, and nothing else."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hicache_rank import Rank, l3store, make_model, tokens
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.runtime_context import get_context

from l3store import registry
from l3store.adapters import sglang as adapter
from l3store.adapters.sglang import hicache, updates
from l3store.adapters.sglang.tally import Tally
from l3store.config import StackOptions
from l3store.errors import (
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    IntegrityError,
)
from l3store.wrap._base import Wrapper

PROMPT = tokens(8)
PAGES = 8
CANARY = 0x3C


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "model")


class Troubled(Wrapper):
    """A store that works until a test says otherwise."""

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, interruptible=False)
        self.pass_on = threading.Event()
        self.pass_on.set()
        self.trouble = None
        self.begun, self.hanging, self.returned = 0, 0, 0

    def _call(self, call):
        self.begun += 1
        self.hanging += 1
        self.pass_on.wait(20)
        self.hanging -= 1
        try:
            if self.trouble is not None:
                raise self.trouble
            return call()
        finally:
            self.returned += 1

    def page_get(self, keys, into, check=None):
        return self._call(lambda: self.inner.page_get(keys, into, check))

    def page_set(self, keys, pages):
        return self._call(lambda: self.inner.page_set(keys, pages))

    def batch_exists(self, keys):
        return self._call(lambda: self.inner.batch_exists(keys))


def wait_for(what):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


@pytest.fixture
def troubled(model, monkeypatch):
    """Returns (rank, store): an engine's cache over a troubled store, with PROMPT backed up."""
    ranks = []

    def make(late="staged", **stack):
        store = Troubled(registry.open("memory://?capacity=64MiB", raw=True))
        options = StackOptions(late=late, **{"deadline": 0.3} | stack)
        monkeypatch.setattr(
            registry, "open", lambda url: registry.stack(store, options, name="memory")
        )
        rank = Rank(model, l3store("memory://"))
        ranks.append((rank, store))
        rank.insert(PROMPT)
        rank.backup()
        rank.wipe()
        return rank, store

    yield make
    for rank, store in ranks:
        store.pass_on.set()
        rank.close()


def fetched(rank, host_page=0):
    """Asks for PROMPT's pages, into host pages from `host_page` on, as the read thread does."""
    size = rank.geometry.page_size
    indices = torch.arange(host_page * size, (host_page + PAGES) * size)
    return rank.backend.batch_get_v1(hashes(rank), indices)


def hashes(rank):
    """Returns the page hashes of PROMPT."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return get_storage_hash_str(PROMPT, None, page_size=rank.geometry.page_size)


def host_bytes(rank):
    return rank.host.kv_buffer.view(torch.uint8)


class TestStaged:
    """``late=staged``: a call that hangs is left behind, and never touches the engine's pages."""

    def test_host_pages_are_the_engines_again_as_soon_as_it_is_answered(self, troubled):
        rank, store = troubled()
        store.pass_on.clear()
        began = time.monotonic()
        assert fetched(rank) == [False] * PAGES
        assert time.monotonic() - began < 10
        assert store.hanging == 1
        host_bytes(rank).fill_(CANARY)  # the engine gives the pages to another request
        store.pass_on.set()
        wait_for(lambda: store.returned == store.begun)
        time.sleep(0.05)
        assert bool((host_bytes(rank) == CANARY).all())
        assert rank.backend.outcomes()["get", "timeout"] == PAGES

    def test_a_backup_that_hangs_stores_what_was_in_the_pages_when_it_was_asked(self, troubled):
        rank, store = troubled()
        rank.backend.clear()
        expected = rank.insert(PROMPT, seed=1)
        store.pass_on.clear()
        rank.backup()  # ends at the deadline
        host_bytes(rank).fill_(CANARY)
        store.pass_on.set()
        wait_for(lambda: store.returned == store.begun)
        wait_for(lambda: rank.backend.batch_exists(hashes(rank)) == PAGES)
        rank.wipe()
        assert rank.prefetch(PROMPT) == len(PROMPT)
        loaded = rank.load_back(PROMPT)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)

    def test_requests_go_on_without_l3_and_find_it_again(self, troubled):
        rank, store = troubled(breaker_cooldown=0.1)
        store.pass_on.clear()
        assert rank.prefetch(PROMPT) == 0
        store.pass_on.set()
        wait_for(lambda: rank.prefetch(PROMPT, rid="again") == len(PROMPT))


class TestWait:
    """``late=wait``: a call that hangs is waited for, and no further call starts meanwhile."""

    def test_it_ends_with_the_call_and_others_are_refused_at_once(self, troubled):
        rank, store = troubled(late="wait")
        store.pass_on.clear()
        answers = []
        reader = threading.Thread(target=lambda: answers.append(fetched(rank)))
        reader.start()
        wait_for(lambda: store.hanging == 1)
        time.sleep(0.4)  # past the deadline
        begun = store.begun
        assert rank.backend.batch_exists(hashes(rank)) == 0
        assert fetched(rank, host_page=PAGES) == [False] * PAGES
        assert store.begun == begun
        assert answers == []
        store.pass_on.set()
        reader.join(20)
        # It was late, but all of it came: those pages are good.
        assert answers == [[True] * PAGES]

    def test_nothing_is_written_once_it_answered(self, troubled):
        rank, store = troubled(late="wait")
        store.trouble = BackendUnavailable("gone")
        assert fetched(rank) == [False] * PAGES
        host_bytes(rank).fill_(CANARY)
        time.sleep(0.05)
        assert bool((host_bytes(rank) == CANARY).all())


ERRORS = {
    "unavailable": BackendUnavailable("the server is gone"),
    "timeout": BackendTimeout("late"),
    "full": CapacityError("full"),
    "refused": ValueError("what is this"),
}


class TestNothingRaises:
    """Each error is a miss, or a page not stored, and is counted by its reason."""

    @pytest.mark.parametrize("reason", ["unavailable", "timeout", "refused"])
    def test_reads(self, troubled, reason):
        rank, store = troubled()
        store.trouble = ERRORS[reason]
        assert fetched(rank) == [False] * PAGES
        assert rank.backend.outcomes()["get", reason] == PAGES
        assert rank.backend.batch_exists(hashes(rank)) == 0
        assert rank.backend.outcomes()["exists", reason] == PAGES

    @pytest.mark.parametrize("reason", ERRORS)
    def test_writes(self, troubled, reason):
        rank, store = troubled()
        store.trouble = ERRORS[reason]
        rank.insert(tokens(PAGES, seed=1))
        rank.backup()
        assert rank.backend.outcomes()["set", reason] == PAGES

    def test_what_arrived_before_an_error_counts(self, troubled):
        rank, store = troubled()
        whole = store.inner.page_get

        def cut_short(keys, into, check=None):
            done = whole(keys[:3], into[:3], check)
            raise BackendUnavailable("cut", done=done + [False] * (len(keys) - 3))

        store.inner.page_get = cut_short
        assert fetched(rank) == [True] * 3 + [False] * (PAGES - 3)
        outcomes = rank.backend.outcomes()
        assert (outcomes["get", "read"], outcomes["get", "unavailable"]) == (3, PAGES - 3)

    def test_damage_is_a_miss_from_there_on(self, troubled):
        rank, store = troubled()
        whole = store.inner.page_get

        def damaged(keys, into, check=None):
            done = whole(keys, into, check)
            into[2][1][5] ^= 1
            return done

        store.inner.page_get = damaged
        assert rank.prefetch(PROMPT) == 2 * rank.geometry.page_size
        assert rank.backend.outcomes()["get", "integrity"] == 1

    def test_the_page_of_another_key_is_told_apart(self, troubled):
        rank, store = troubled()
        whole = store.inner.page_get
        store.inner.page_get = lambda keys, into, check=None: whole(
            [*keys[:2], keys[3], *keys[3:]], into, check
        )
        assert fetched(rank) == [True, True, False, *[True] * (PAGES - 3)]
        assert rank.backend.outcomes()["get", "recycled"] == 1

    def test_absent(self, troubled):
        rank, _ = troubled()
        rank.backend.clear()
        assert fetched(rank) == [False] * PAGES
        assert rank.backend.outcomes()["get", "absent"] == PAGES

    def test_a_store_that_only_reads_refuses_and_says_so(self, model, tmp_path, caplog):
        url = f"nvme://{tmp_path}/store?capacity=64MiB&segment=4MiB"
        writer = Rank(model, l3store(url))
        writer.insert(PROMPT)
        writer.backup()
        writer.close()
        reader = Rank(model, l3store(f"{url}&mode=ro"))
        try:
            assert reader.prefetch(PROMPT) == len(PROMPT)
            reader.insert(tokens(PAGES, seed=3))
            with caplog.at_level(logging.WARNING, "l3store.sglang"):
                reader.backup()
            assert reader.backend.outcomes()["set", "refused"] == PAGES
            assert any("read-only" in record.getMessage() for record in caplog.records)
        finally:
            reader.close()

    def test_after_close(self, troubled):
        rank, _ = troubled()
        backend = rank.backend
        backend.close()
        backend.close()
        assert fetched(rank) == [False] * PAGES
        assert backend.batch_exists(hashes(rank)) == 0


class TestWeightUpdates:
    """After an update of the weights the pages in the store are those of other weights."""

    @pytest.fixture(autouse=True)
    def _before_any_update(self, monkeypatch):
        monkeypatch.setattr(updates, "_count", 0)
        monkeypatch.setattr(updates, "_unnamed", False)
        yield
        get_context().override("test", weight_version="default")

    def _update(self, version):
        """Ends an update as the scheduler's weight updater does."""
        change = SimpleNamespace(
            record_weight_version_change=lambda new_version: (
                new_version and get_context().override("test", weight_version=new_version)
            )
        )
        SchedulerWeightUpdaterManager.record_weight_version_after_update(
            SimpleNamespace(scheduler=change), version
        )

    @pytest.mark.parametrize("version", [None, "step-2"])
    def test_l3_is_off_until_it_is_attached_again(self, troubled, version):
        rank, _ = troubled()
        assert rank.backend.batch_exists(hashes(rank)) == PAGES
        self._update(version)
        assert rank.backend.batch_exists(hashes(rank)) == 0
        assert fetched(rank) == [False] * PAGES
        rank.insert(tokens(PAGES, seed=2))
        rank.backup()
        assert rank.backend.outcomes()["set", "refused"] == PAGES

    def test_an_update_that_was_named_has_pages_of_its_own(self, model, tmp_path):
        extra = l3store(f"nvme://{tmp_path}/store?capacity=64MiB&segment=4MiB")
        for version, found in ((None, 0), ("step-2", 0), ("step-3", 0), ("step-2", PAGES)):
            if version:
                self._update(version)
            rank = Rank(model, extra)
            # The harness publishes new arguments, of which the version is one.
            rank.close()
            if version:
                get_context().override("test", weight_version=version)
            assert rank.cache.attach_storage_backend(
                "dynamic", json.dumps(extra), served_model_name="tiny/model"
            )[0]
            assert rank.backend.batch_exists(hashes(rank)) == found
            rank.insert(PROMPT)
            rank.backup()
            rank.close()

    def test_an_update_without_a_name_must_be_named_at_the_next_attach(self, model):
        self._update(None)
        with pytest.raises(ConfigError, match="tell option 'weights_revision'"):
            Rank(model, l3store("memory://"))
        Rank(model, l3store("memory://", weights_revision="r2")).close()


class TestClear:
    def test_it_counts_and_leaves_other_places_alone(self, model, tmp_path):
        url = f"nvme://{tmp_path}/store?capacity=64MiB&segment=4MiB"
        ours = Rank(model, l3store(url))
        ours.insert(PROMPT)
        ours.backup()
        other = Rank(model, l3store(url, tag="other"))
        try:
            other.insert(PROMPT)
            other.backup()
            assert tuple(ours.backend.clear()) == (PAGES, 0)
            assert ours.backend.batch_exists(hashes(ours)) == 0
            assert other.backend.batch_exists(hashes(other)) == PAGES
            assert tuple(ours.backend.clear()) == (0, 0)
        finally:
            other.close()
            ours.close()


class TestAttach:
    """What is wrong is told at attach, and leaves the engine able to attach again."""

    def test_a_wrong_option_is_told_when_the_engine_starts(self, model):
        with pytest.raises(ConfigError, match=r"unknown option 'capacty'.*did you mean 'capacity'"):
            Rank(model, l3store("memory://?capacty=1GiB"))

    def test_another_version_of_sglang_is_named(self, model, monkeypatch):
        def moved(config, options):
            raise AttributeError("no attribute 'dcp_size'")

        monkeypatch.setattr(hicache, "look", moved)
        with pytest.raises(ConfigError, match=r"sglang .*dcp_size.*written for 0\.5\.23"):
            Rank(model, l3store("memory://"))

    def test_a_pool_that_lacks_what_this_version_has_names_both(self, model, monkeypatch):
        monkeypatch.setattr(hicache, "identify", lambda *_: SimpleNamespace().heads)
        with pytest.raises(ConfigError, match=r"sglang .*'heads'.*written for 0\.5\.23"):
            Rank(model, l3store("memory://"))

    def test_an_sglang_that_lacks_a_name_names_both_versions(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "l3store.adapters.sglang.hicache", None)
        with pytest.raises(ImportError, match=r"sglang 0.*written for 0\.5\.23: docs/sglang"):
            adapter.L3StoreHiCache  # noqa: B018

    def test_the_engine_can_attach_again_after_a_refusal(self, model, monkeypatch):
        rank = Rank(model, l3store("memory://"))
        attach = rank.cache.attach_storage_backend
        good = "{" + '"backend_name": "l3store", "module_path": "l3store.adapters.sglang", '
        good += '"class_name": "L3StoreHiCache", "interface_v1": 1, "url": "memory://"'
        try:
            assert rank.cache.detach_storage_backend()[0]
            monkeypatch.setattr(rank.host, "stores_page_envelope", True)
            done, said = attach("dynamic", good + "}", served_model_name="tiny/model")
            assert (done, "page envelopes" in said) == (False, True)
            monkeypatch.undo()
            assert attach("dynamic", good + ', "urll": "x"}', served_model_name="m")[0] is False
            assert attach("dynamic", good + "}", served_model_name="tiny/model")[0] is True
            rank.insert(PROMPT)
            rank.backup()
            assert rank.backend.batch_exists(hashes(rank)) == PAGES
        finally:
            rank.close()


class TestLog:
    def test_trouble_is_told_once_in_a_while_and_counted_meanwhile(self, caplog):
        now = [0.0]
        tally = Tally("tp0", 60.0, clock=lambda: now[0])
        with caplog.at_level(logging.INFO, "l3store.sglang"):
            for _ in range(5):
                tally.add("get", "kv", {"timeout": 8}, IntegrityError("why"))
            assert len(caplog.records) == 1
            now[0] = 11.0
            tally.add("get", "kv", {"timeout": 8})
            assert "4 such calls before" in caplog.records[1].getMessage()
            now[0] = 61.0
            tally.add("get", "kv", {"read": 3})
            assert caplog.records[2].getMessage() == "tp0: kv: get read 3, get timeout 48"
            assert len(caplog.records) == 3
            tally.add("get", "kv", {"read": 2, "absent": 0})
            tally.close()
        assert caplog.records[3].getMessage() == "tp0: kv: get read 2"

    def test_pools_are_told_apart_in_the_log_and_counted_together(self, caplog):
        tally = Tally("tp0", 60.0)
        with caplog.at_level(logging.INFO, "l3store.sglang"):
            tally.add("set", "mamba", {"stored": 1})
            tally.add("set", "kv", {"stored": 2})
            tally.close()
        assert caplog.messages == ["tp0: kv: set stored 2; mamba: set stored 1"]
        assert tally.outcomes() == {("set", "stored"): 3}
