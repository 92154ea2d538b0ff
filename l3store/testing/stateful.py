"""Any sequence of calls against a dict: hypothesis looks for the one where they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from l3store import registry
from l3store.testing.kit import Pages, bare

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.abc import Backend
    from l3store.testing.suite import Suite

__all__ = ["check_against_model"]

_PAGES = 6
_places = st.sampled_from(["model-1/kv/T0of2", "model-1/kv/T1of2", "model-2/kv/all"])
_numbers = st.lists(st.integers(0, _PAGES - 1), max_size=5)


class _Machine(RuleBasedStateMachine):
    """The store inside its wrappers beside a dict; damage and reopening are steps, too."""

    suite: Suite
    new_url: Callable[[], str]

    @initialize()
    def begin(self) -> None:
        self.url = type(self).new_url()
        self.store: Backend = registry.open(self.url)
        self.model: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        self.meta: dict[str, bytes] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    def _pages(self, place: str) -> Pages:
        return Pages(count=_PAGES, size=512, place=place)

    def _known(self, key: str) -> bool:
        return key in self.model and key not in self.damaged

    @rule(place=_places, numbers=_numbers)
    def set(self, place: str, numbers: list[int]) -> None:
        pages = self._pages(place)
        chosen = [pages.keys[i] for i in numbers]
        sealed = pages.sealed()
        assert self.store.page_set(chosen, [sealed[i] for i in numbers]) == [True] * len(numbers)
        for i in numbers:
            # A damaged page may stand until somebody has read it: either is right.
            self.model.setdefault(pages.keys[i], pages.payloads[i])

    @rule(place=_places, numbers=_numbers)
    def get(self, place: str, numbers: list[int]) -> None:
        pages, room = self._pages(place), Pages(count=5, size=512).room()
        chosen = [pages.keys[i] for i in numbers]
        done = self.store.page_get(chosen, room.pages[: len(chosen)])
        for at, (i, key, good) in enumerate(zip(numbers, chosen, done, strict=True)):
            if good:
                assert key in self.model, "a page was read that nobody has set"
                assert room.payload(at) == pages.payloads[i], "a page was read wrong"
                self.damaged.discard(key)  # set again since: whole
            else:
                assert not self._known(key), "a page that is stored was not read"
                if key in self.damaged and self.store.capabilities.delete:
                    self.damaged.discard(key)
                    self.model.pop(key)
        assert room.intact()

    @rule(place=_places, numbers=_numbers)
    def exists(self, place: str, numbers: list[int]) -> None:
        chosen = [self._pages(place).keys[i] for i in numbers]
        each, run = self.store.exists_each(chosen), self.store.batch_exists(chosen)
        for key, there in zip(chosen, each, strict=True):
            assert there or not self._known(key), "a stored page is said to be absent"
            assert key in self.model or not there, "an absent page is said to be stored"
        assert run == next((i for i, there in enumerate(each) if not there), len(each))

    @precondition(lambda self: self.store.capabilities.delete)
    @rule(place=_places, numbers=_numbers)
    def delete(self, place: str, numbers: list[int]) -> None:
        chosen = [self._pages(place).keys[i] for i in numbers]
        for key, gone in zip(chosen, self.store.delete(chosen), strict=True):
            assert gone or not self._known(key), "a stored page was not deleted"
            self.model.pop(key, None)
            self.damaged.discard(key)

    @precondition(lambda self: self.store.capabilities.headers)
    @rule(place=_places, numbers=_numbers)
    def headers(self, place: str, numbers: list[int]) -> None:
        pages = self._pages(place)
        chosen = [pages.keys[i] for i in numbers]
        for i, key, header in zip(numbers, chosen, self.store.headers(chosen), strict=True):
            if self._known(key):
                assert header == pages.stored(i)[:128]

    @rule(place=_places, number=st.integers(0, _PAGES - 1), bit=st.integers(0, 8 * 640 - 1))
    def damage(self, place: str, number: int, bit: int) -> None:
        pages = self._pages(place)
        key = pages.keys[number]
        if self._known(key):
            changed = bytearray(pages.stored(number))
            changed[bit // 8] ^= 1 << bit % 8
            type(self).suite.raw_write(bare(self.store), key, bytes(changed))
            self.damaged.add(key)

    @rule(
        name=st.sampled_from(["model-1", "model-2", "model-1/kv/all"]), data=st.binary(max_size=40)
    )
    def put_meta(self, name: str, data: bytes) -> None:
        self.store.put_meta(name, data)
        self.meta[name] = data

    @precondition(lambda self: self.store.capabilities.durable)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = registry.open(self.url)

    @invariant()
    def descriptors_are_as_they_were_put(self) -> None:
        if hasattr(self, "meta"):
            assert self.store.list_meta() == sorted(self.meta)
            for name, data in self.meta.items():
                assert self.store.get_meta(name) == data

    @precondition(lambda self: hasattr(self, "store") and self.store.capabilities.listing)
    @invariant()
    def the_listing_is_what_is_stored(self) -> None:
        listed = list(self.store.scan())
        assert len(set(listed)) == len(listed)
        assert {k for k in self.model if self._known(k)} <= set(listed) <= set(self.model)


def check_against_model(suite: Suite, new_url: Callable[[], str], *, examples: int = 25) -> None:
    """Runs random sequences of calls on stores of a suite and on a dict, and compares.

    Args:
        suite: Gives `raw_write`.
        new_url: Gives the URL of a new, empty store for each sequence.
        examples: Sequences; each has up to 30 steps.

    Raises:
        AssertionError: They differ; hypothesis prints the shortest sequence it found.
    """
    machine: Any = type("Machine", (_Machine,), {"suite": suite, "new_url": staticmethod(new_url)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
