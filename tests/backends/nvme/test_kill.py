"""kill -9 at any moment: what was acknowledged stays, nothing wrong is read, no slot is lost."""

from __future__ import annotations

import shutil

import pytest

from l3store import registry
from l3store.testing.kit import bare
from tests.backends.nvme._crash import PLACE, Batch, Job, Siege, Told, opened_nursery

OTHER = "crash-0/indexer/all"


@pytest.fixture(scope="module")
def nursery():
    with opened_nursery() as opened:
        yield opened


# -- at every change that one page_set makes ------------------------------------------------------


class Scene:
    """A store, a process that goes on (this one), and one that is killed inside `page_set`."""

    count, size = 16, 8192

    def __init__(self, nursery, folder):
        self.nursery, self.logs = nursery, folder / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        self.url = f"nvme://{folder}/store?capacity=1MiB&segment=128KiB&writers=2&workers=2"
        self.number = 0
        self.batch = Batch(self.count, self.size)

    def told(self, **options):
        """What a worker tells that sets one batch."""
        self.number += 1
        job = Job(
            self.url, str(self.logs), self.number, 0, self.number, self.count, self.size,
            once=True, **options,
        )  # fmt: skip
        self.nursery.start(job).wait()
        lines = Told(self.logs / str(self.number)).more()
        words = {words[0]: words[1:] for _, words in lines}
        assert "error" not in words, words
        return words

    def stored(self, store, number, place=PLACE):
        """Which pages of a batch are there; each is as it was set."""
        batch = Batch(self.count, self.size, place)
        done = store.page_get(batch.keys(number), batch.room)
        assert not batch.wrong(number, done)
        return done

    def set(self, store, number, place=PLACE):
        batch = Batch(self.count, self.size, place)
        return store.page_set(batch.keys(number), batch.sealed(number))

    def after_a_kill(self, survivor, place):
        """Whatever the victim did: all agree, nothing is wrong, and what is set is there."""
        number = self.number
        self.stored(survivor, number, place)
        assert bare(survivor).check_integrity() == []
        with registry.open(f"{self.url}&mode=ro") as fresh:
            self.stored(fresh, number, place)
            assert bare(fresh).check_integrity() == []
        assert all(self.set(survivor, number, place))
        assert all(self.stored(survivor, number, place))
        words = self.told(place=place)  # it takes over what the victim had
        assert "problem" not in words
        assert words["stored"][1] == "1" * self.count
        assert all(self.stored(survivor, self.number, place))
        with registry.open(f"{self.url}&mode=ro") as fresh:
            assert sorted(fresh.scan()) == sorted(survivor.scan())
            assert bare(fresh).check_integrity() == []
        assert bare(survivor).check_integrity() == []


@pytest.fixture(scope="module")
def full(nursery, tmp_path_factory):
    """The folder of a full store, half of it written by this process, half by another one."""
    folder = tmp_path_factory.mktemp("full")
    scene = Scene(nursery, folder)
    with registry.open(scene.url) as store:
        for number in range(100, 105):
            scene.set(store, number)
        for _ in range(5):
            scene.told()
    return folder


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("scenario", ["first", "full", "move"])
def test_a_kill_at_every_change_of_a_page_set(nursery, full, tmp_path, scenario, how):
    """The first one of a store; one that evicts; one that takes a segment from another place.

    The store's keeper works beside the call, so that the number of changes is not quite the same
    each time: the end is reached when a call comes through.
    """
    place = OTHER if scenario == "move" else PLACE
    for at in range(1, 100):
        folder = tmp_path / str(at)
        if scenario == "first":
            folder.mkdir()
        else:
            shutil.copytree(full, folder)
        scene = Scene(nursery, folder)
        with registry.open(scene.url) as survivor:
            scene.set(survivor, 200)
            words = scene.told(place=place, kill_at=at, how=how)
            if "stored" in words:
                break
            scene.after_a_kill(survivor, place)
        shutil.rmtree(folder)
    assert 5 < int(words["changes"][0]) < at


# -- at any moment, with others at work -----------------------------------------------------------


@pytest.mark.timeout(300)
def test_sixty_kills_take_nothing_that_was_acknowledged(nursery, tmp_path):
    """Four processes write and read batches of 128 pages of 64 KiB in a store of 32 such batches.

    A page may be missing only if the process that evicted it said so before it did.
    """
    siege = Siege(nursery, tmp_path, seed=3)
    for _ in range(60):
        siege.round()
        assert siege.faults == []
    siege.end()
    assert siege.faults == []
    assert siege.counts["inside"] >= 0.3 * siege.counts["kills"]
    assert siege.counts["closed"] == 4
    assert min(siege.counts["read"], siege.counts["checked"]) > 60
