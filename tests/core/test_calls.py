"""The gate that closes a backend, and the threads that its calls run on."""

from __future__ import annotations

import os
import threading

import pytest

from l3store import calls
from l3store.calls import Gate, Workers
from l3store.errors import BackendUnavailable


def test_a_gate_shut_in_vain_tells_once_when_nothing_runs_any_more():
    gate = Gate("store")
    with gate:
        assert not gate.shut(seconds=0.01), "a call is running"
    assert gate.shut(seconds=1), "else nobody would free what the calls used"
    assert not gate.shut(seconds=1)


def test_after_stop_a_task_is_refused_and_does_not_wait_for_ever():
    workers = Workers(2, "test")
    first = workers.submit(lambda: 1)
    workers.stop()
    assert first.result(10) == 1
    with pytest.raises(BackendUnavailable, match="closed"):
        workers.submit(lambda: 2)


def test_without_a_thread_to_start_a_task_is_refused_and_later_ones_run(monkeypatch):
    workers = Workers(2, "test")

    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(calls, "Thread", NoThread)
        with pytest.raises(BackendUnavailable, match="can't start new thread"):
            workers.submit(lambda: 1)
    assert workers.submit(lambda: 1).result(10) == 1
    gate = threading.Event()
    held = workers.submit(lambda: gate.wait(10))
    with monkeypatch.context() as patched:  # one is there: it does the work of two
        patched.setattr(calls, "Thread", NoThread)
        waiting = workers.submit(lambda: 2)
    gate.set()
    assert (held.result(10), waiting.result(10)) == (True, 2)
    workers.stop()


def test_after_a_fork_the_child_is_told(monkeypatch):
    workers = Workers(1, "test")
    assert workers.submit(lambda: 1).result(10) == 1
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(BackendUnavailable, match="fork"):
        workers.submit(lambda: 1)
