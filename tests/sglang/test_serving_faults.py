"""The store hangs, goes, is full, or holds the KV of other weights, while `sgl.Engine` serves.

Every request finishes, with what it would have been told without a store. How long that may take is
bounded by the driver (a minute a command); what is fast enough is not asked here.
"""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from serving import STORED, EngineError, prompt

pytest_plugins = ["serving_fixtures"]

RANKS = {"TP2": {"tp": 2}, "PP2": {"pp": 2}}


@pytest.fixture(scope="module")
def engine(engines):
    """An engine that runs for the whole file; each test attaches a store of its own."""
    one = engines.engine().start(engines.model(), None)
    yield one
    one.kill()


@pytest.fixture
def attach(engine):
    """Attaches a store to the engine, and detaches it after the test."""
    used = []

    def attach(url):
        used.append(engine.attach({"url": url}))

    yield attach
    if used:
        engine.detach()


def without_a_store(engine, *numbers):
    """What prompts are answered by an engine that has no store attached."""
    answers = engine.ask(*map(prompt, numbers))
    assert not any(answer.storage for answer in answers)
    engine.forget()
    return [answer.said for answer in answers]


def said(answers):
    return [answer.said for answer in answers]


def storage(answers):
    return [answer.storage for answer in answers]


# -- hung -----------------------------------------------------------------------------------------


class Hanging:
    """A store whose calls can be made to hang."""

    def __init__(self, folder):
        self._folder = folder

    def url(self, **options):
        options = {"deadline": "300ms", "breaker_cooldown": "100ms", **options}
        return f"hang://{self._folder}?" + "&".join(f"{k}={v}" for k, v in options.items())

    def hang(self, *calls):
        (self._folder / "hang").write_text("\n".join(calls))

    def let_go(self):
        (self._folder / "hang").unlink(missing_ok=True)

    def hanging(self):
        """The calls that hang now."""
        return [file.name for file in (self._folder / "hanging").iterdir()]

    def wait_until_hanging(self):
        until = time.monotonic() + 30
        while not self.hanging():
            assert time.monotonic() < until, "no call hangs"
            time.sleep(0.02)

    def wait_until_none_hangs(self):
        until = time.monotonic() + 30
        while self.hanging():
            assert time.monotonic() < until, self.hanging()
            time.sleep(0.02)


@pytest.fixture
def store(tmp_path):
    one = Hanging(tmp_path)
    yield one
    one.let_go()


def all_from_storage(engine, numbers, right):
    """Asks until all comes from there; whatever is said meanwhile is right, too."""
    until = time.monotonic() + 30
    while True:
        answers = engine.ask(*map(prompt, numbers))
        engine.forget()
        assert said(answers) == right
        if storage(answers) == [STORED] * len(numbers):
            return
        assert time.monotonic() < until, storage(answers)


@pytest.mark.parametrize("call", ["batch_exists", "page_get"])
def test_calls_that_hang_are_left_behind_and_the_answers_are_right(engine, attach, store, call):
    numbers = range(400, 403)
    right = without_a_store(engine, *numbers)
    attach(store.url(late="staged"))
    all_from_storage(engine, numbers, right)
    store.hang(call)
    answers = engine.ask(*map(prompt, numbers))
    assert store.hanging()
    assert said(answers) == right
    assert storage(answers) == [0, 0, 0]
    engine.forget()
    store.let_go()
    all_from_storage(engine, numbers, right)


def test_writes_that_hang_keep_nobody(engine, attach, store):
    numbers = range(410, 413)
    right = without_a_store(engine, *numbers)
    attach(store.url(late="staged"))
    store.hang("page_set")
    assert said(engine.ask(*map(prompt, numbers))) == right
    store.wait_until_hanging()
    engine.forget()  # which waits for what is on its way to the store
    assert store.hanging()
    assert said(engine.ask(*map(prompt, numbers))) == right
    engine.forget()
    store.let_go()
    store.wait_until_none_hangs()
    all_from_storage(engine, numbers, right)


def test_what_a_late_read_brings_lands_in_no_page_that_is_used_again(engine, attach, store):
    read, kept, more = range(600, 603), range(603, 609), range(609, 615)
    right = without_a_store(engine, *kept)
    attach(store.url(late="staged"))
    all_from_storage(engine, read, said(engine.ask(*map(prompt, read))))
    store.hang("page_get")
    engine.ask(*map(prompt, read))
    engine.forget()  # and L2 begins with its first pages again, as it did before the reads
    assert said(engine.ask(*map(prompt, kept))) == right
    assert store.hanging()
    store.let_go()
    store.wait_until_none_hangs()
    engine.ask(*map(prompt, more))  # which take their place in L1
    answers = engine.ask(*map(prompt, kept))
    assert said(answers) == right
    assert sum(answer.host for answer in answers) > STORED


def test_with_wait_only_who_reads_waits_until_the_call_is_let_go(engine, attach, store):
    there, new = range(420, 422), range(422, 424)
    right = without_a_store(engine, *there, *new)
    attach(store.url(late="wait"))
    all_from_storage(engine, there, right[:2])
    store.hang("page_get")
    engine.post(*map(prompt, there))
    store.wait_until_hanging()
    assert said(engine.ask(*map(prompt, new))) == right[2:]
    assert store.hanging()
    store.let_go()
    assert said(engine.collect()) == right[:2]
    engine.forget()
    all_from_storage(engine, there, right[:2])


@pytest.mark.parametrize("ranks", ["TP2", pytest.param("PP2", marks=pytest.mark.soak)])
def test_calls_of_one_rank_that_hang_are_a_miss_for_all(new_engine, store, ranks):
    second = "P1of2" if ranks == "PP2" else "T1of2"
    numbers = range(430, 433)
    engine = new_engine({"url": store.url(late="staged")}, **RANKS[ranks])
    right = said(engine.ask(*map(prompt, numbers)))
    all_from_storage(engine, numbers, right)
    for call in ("batch_exists", "page_get"):
        store.hang(f"{call} {second}")
        answers = engine.ask(*map(prompt, numbers))
        assert store.hanging()
        assert said(answers) == right
        assert storage(answers) == [0, 0, 0]
        engine.forget()
        store.let_go()
        all_from_storage(engine, numbers, right)


# -- gone, full -----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["nvme://{}?capacity=64MiB", "file://{}"])
def test_a_store_that_is_removed_is_none_and_harms_nobody(engine, attach, tmp_path, url):
    there, new = range(440, 442), range(442, 444)
    right = without_a_store(engine, *there, *new)
    attach(url.format(tmp_path / "store"))
    engine.ask(*map(prompt, there))
    engine.forget()
    shutil.rmtree(tmp_path / "store")
    for _ in range(2):
        assert said(engine.ask(*map(prompt, [*there, *new]))) == right
        engine.forget()


def only_what_came_first(engine, numbers, right):
    """All answers are right on a store with room for little more than the first prompt."""
    assert said(engine.ask(prompt(numbers[0]))) == right[:1]
    engine.forget()
    assert said(engine.ask(*map(prompt, numbers[1:]))) == right[1:]
    engine.forget()
    answers = engine.ask(*map(prompt, numbers))
    assert said(answers) == right
    assert answers[0].storage == STORED
    assert sum(storage(answers)) < 2 * STORED


def test_a_full_store_gives_back_what_it_has(engine, attach, tmp_path):
    numbers = range(450, 453)
    right = without_a_store(engine, *numbers)
    attach(f"nvme://{tmp_path / 'store'}?capacity=512KiB&segment=32KiB&evict=none")
    only_what_came_first(engine, numbers, right)


def test_a_full_disk_gives_back_what_is_on_it(engine, attach, tmp_path):
    numbers = range(460, 463)
    right = without_a_store(engine, *numbers)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        attach(f"file://{disk}/store")
        only_what_came_first(engine, numbers, right)
    finally:
        engine.detach()
        subprocess.run(["umount", "-l", str(disk)], check=True)


# -- other weights --------------------------------------------------------------------------------


def test_after_a_weight_update_nothing_comes_from_other_weights(
    engine, engines, new_engine, tmp_path
):
    """Whether the update names a version or not; L3 is off until it is attached anew."""
    numbers = range(470, 472)
    store = {"url": f"file://{tmp_path / 'store'}"}
    first = without_a_store(engine, *numbers)
    second = without_a_store(new_engine(None, seed=1), *numbers)
    engine = new_engine(store)
    assert said(engine.ask(*map(prompt, numbers))) == first

    def update(seed, version, right):
        engine.forget()
        engine.do("update_weights", str(engines.model(seed)), version)
        for _ in range(2):
            answers = engine.ask(*map(prompt, numbers))
            assert said(answers) == right
            assert storage(answers) == [0, 0]
            engine.forget()
        engine.detach()

    update(1, None, second)
    with pytest.raises(EngineError, match="tell option 'weights_revision'"):
        engine.attach(store)
    engine.attach({**store, "weights_revision": "second"})
    all_from_storage(engine, numbers, second)
    update(0, "third", first)
    engine.attach(store)
    all_from_storage(engine, numbers, first)
