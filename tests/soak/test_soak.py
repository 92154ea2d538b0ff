"""The long runs: `make soak`. Same promises as the suite, many more rounds."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from l3store import registry
from l3store.testing.kit import Pages, second_process
from l3store.testing.stateful import check_against_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

_WRITE_FOREVER = """
i = int(sys.stdin.readline())
while True:
    pages = Pages(count=128, size=65536, seed=i)
    say("begin", i)
    store.page_set(pages.keys, pages.sealed())
    say("stored", i)
    i += 1
"""

_CHURN = """
import random
rng, wrong = random.Random(int(sys.stdin.readline())), 0
until = time.monotonic() + 60
while time.monotonic() < until:
    pages = Pages(count=8, size=16384, seed=rng.randrange(20))
    what = rng.randrange(4)
    if what == 0:
        store.page_set(pages.keys, pages.sealed())
    elif what == 1:
        store.delete(pages.keys[rng.randrange(8):])
    else:
        room = pages.room()
        wrong += len(pages.wrong(store.page_get(pages.keys, room.pages), room))
say(wrong)
"""


class _Plain:
    """The helpers that damage a page behind the backend's back."""

    def raw_write(self, backend, key, data):
        if hasattr(backend, "_pages"):
            backend._pages[key] = data
            return
        place, _, digits = key.rpartition("/")
        with open(f"{backend._folder.name}/pages/{place}/{digits[:2]}/{digits}", "wb") as file:
            file.write(data)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_thousand_sequences_agree_with_a_dict(tmp_path, scheme):
    numbers = itertools.count()
    check_against_model(
        _Plain(),
        lambda: "memory://" if scheme == "memory" else f"file://{tmp_path}/{next(numbers)}",
        examples=1000,
    )


def test_300_killed_writers_leave_whole_pages_or_none(tmp_path):
    """And what was acknowledged is there after every kill."""
    url, rng, at = f"file://{tmp_path}/store", random.Random(1), 0
    for _ in range(300):
        with second_process(url, _WRITE_FOREVER) as writer:
            print(at, file=writer.stdin, flush=True)
            writer.stdout.readline()
            time.sleep(rng.random() * 0.06)
            writer.kill()
            said = [line.split() for line in writer.stdout.read().splitlines()]
        acknowledged = [int(words[1]) for words in said if len(words) == 2 and words[0] == "stored"]
        begun = max([at, *(int(w[1]) for w in said if len(w) == 2 and w[0] == "begin")])
        with registry.open(url) as store:
            for i in range(at, begun + 1):
                pages = Pages(count=128, size=65536, seed=i)
                room = pages.room()
                done = store.page_get(pages.keys, room.pages)
                assert done == store.exists_each(pages.keys)
                assert not pages.wrong(done, room)
                assert i not in acknowledged or all(done)
                store.delete(pages.keys)
        at = begun + 1


def test_processes_that_set_delete_and_read_at_once_never_read_wrong_bytes(tmp_path):
    url = f"file://{tmp_path}/store"
    others = [second_process(url, _CHURN) for _ in range(4)]
    for seed, process in enumerate(others):
        print(seed, file=process.stdin, flush=True)
    assert [process.communicate()[0] for process in others] == ["0\n"] * 4
