"""One rank of a group, as an engine embeds it: its machine, its facts and its agreement."""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING

from l3store.consensus.protocol import Machine
from l3store.consensus.values import Consume, Grant, Kind, Release, Settle, Span
from l3store.errors import ConfigError, ConsensusError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from l3store.consensus.agreement import Agreement
    from l3store.consensus.protocol import Ledger
    from l3store.consensus.values import Effect, OpId, Record, TicketId

__all__ = ["Member"]


class Member:
    """A rank's seat in the group. All methods belong to one thread: the one that steps first.

    In each step the engine first calls `step`, carries out the effects in their order, then gives
    its inputs: the same ones in the same order on every rank. `abort` and `want` have effects at
    once, which it carries out, too. Its I/O threads write `facts`.

    Attributes:
        machine: The replicated state, to be read.
        facts: The table that I/O threads write.
    """

    def __init__(self, agreement: Agreement, ledger: Ledger) -> None:
        self.machine = Machine(agreement.config, ledger)
        self.facts = agreement.facts
        self._agreement = agreement
        self._thread: int | None = None
        self._failure: Exception | None = None
        self._trace: TracebackType | None = None

    def step(self, number: int | None = None) -> list[Effect]:
        """Applies the next record and returns its effects; blocks until the record is here.

        Args:
            number: Of the record, if the engine counts them too: 1 in the first step.

        Raises:
            ConsensusError: A rank is lost, or ranks differ: this rank cannot go on, every later
                call raises it again, and the other ranks are told. Or the number is not the next
                one, or this is another thread than the first one: nothing has happened.
        """
        self._enter()
        following = self.machine.number + 1
        if number not in (None, following):
            raise ConsensusError(f"step {number} is out of order: the next one is {following}")
        with self._ending():
            return self._apply(self._agreement.step(self.machine))

    def poll(self) -> list[Effect] | None:
        """As `step`, but returns None if the record is not here yet."""
        self._enter()
        with self._ending():
            record = self._agreement.poll(self.machine)
            return None if record is None else self._apply(record)

    def decide(self) -> bytes:
        """Leader: the next record, for an engine that carries it in a broadcast of its own."""
        self._enter()
        if self._agreement.rank:
            return self._agreement.decide(self.machine)  # says who decides, and nothing has ended
        with self._ending():
            return self._agreement.decide(self.machine)

    def accept(self, data: bytes) -> list[Effect]:
        """Applies a record that the engine has carried; the leader does it too."""
        self._enter()
        with self._ending():
            return self._apply(self._agreement.accept(data))

    def submit(self, span: Span) -> TicketId | None:
        """Opens a ticket, see `Machine.submit`; its query may begin.

        Returns:
            None on every rank: the request runs without L3, as in a group that is still off.

        Raises:
            ConfigError: It is no `Span`, or one that is too long: nothing has changed.
            ConsensusError: As `Machine.submit`.
        """
        self._enter()
        if not isinstance(span, Span):
            raise ConfigError(f"submit of {span!r}: it takes a Span")
        ticket = self.machine.submit(span)
        if ticket is not None:
            self.facts.open(ticket, span)
        return ticket

    def abort(self, rid: str, attempt: int = 0) -> list[Effect]:
        """Ends an attempt at any time, see `Machine.abort`."""
        self._enter()
        with self._whole():
            return self._note(self.machine.abort(rid, attempt))

    def want(self, ticket: TicketId) -> list[Effect]:
        """The scheduler would run the request now, see `Machine.want`."""
        self._enter()
        with self._whole():
            return self._note(self.machine.want(ticket))

    def issue(self, kind: Kind) -> OpId:
        """Numbers an operation; it may begin, and must be acked, also if there is nothing to do.

        Raises:
            ConfigError: It is no `Kind`: nothing has changed.
        """
        self._enter()
        if not isinstance(kind, Kind):
            known = nearest(str(kind), [each.name for each in Kind])
            raise ConfigError(f"issue of {kind!r}: it takes a Kind{known}")
        op = self.machine.issue(kind)
        self.facts.issued(kind, op)
        return op

    def witness(self, value: int) -> None:
        """Has the ranks compare a value of the engine, see `Machine.witness`."""
        self._enter()
        self.machine.witness(value)

    def close(self) -> None:
        """Leaves the group; idempotent, from any thread."""
        self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._agreement.fail(error)
        self.close()

    def _enter(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)  # or it grows with each call
        caller = get_ident()
        if self._thread is None:
            self._thread = caller
        elif caller != self._thread:
            raise ConsensusError(
                "two threads step one member: one thread steps, others write facts"
            )

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """What goes wrong here goes wrong for ever, and for all ranks."""
        try:
            yield
        except Exception as error:  # the engine's ledger, too: a record is half applied
            self._end(error)
            raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """As `_ending`, but an input that is refused has changed nothing, and ends nothing."""
        before = self.machine.digest
        try:
            yield
        except Exception as error:  # the engine's ledger: the ticket would be settled in silence
            if self.machine.digest != before:
                self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        self._failure, self._trace = error, error.__traceback__
        self._agreement.fail(error)

    def _apply(self, record: Record) -> list[Effect]:
        effects = self._note(self.machine.apply(record))
        machine = self.machine
        digests = machine.digests(machine.config.window)
        self.facts.applied(record.number, digests, machine.epoch, storage_on=machine.storage_on)
        return effects

    def _note(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Grant):
                self.facts.granted(effect.ticket, effect.pages)
            elif isinstance(effect, Settle):
                if effect.granted:
                    self.facts.settle(effect.ticket)
                else:
                    self.facts.close(effect.ticket)
            elif isinstance(effect, Release):
                self.facts.close(effect.ticket)
            elif isinstance(effect, Consume):
                self.facts.consumed(effect.kind, effect.op)
        return effects
