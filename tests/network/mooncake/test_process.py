"""What the library would do to a process: crash it, hang it, fill its output, outlive a fork.

Each in a process of its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from l3store import registry

_HEAD = """
import gc, os, signal, sys, threading, time
from l3store import registry
from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError
from l3store.testing.kit import Pages
url, pages = sys.argv[1], Pages()
"""


def run(url, code, *, seconds=40):
    """Returns exit code, output and errors of a process that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + textwrap.dedent(code), url],
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_after_close_calls_are_refused_and_the_library_is_not_touched(mooncake_server, url):
    code = """
        for lends in ("", "&segment=16MiB"):
            store = registry.open(url + lends, raw=True)
            store.page_set(pages.keys, pages.sealed())
            client = store._client
            store.close()
            for call in (
                lambda: store.batch_exists(pages.keys), lambda: store.headers(pages.keys),
                lambda: store.page_get(pages.keys, pages.room().pages), lambda: store.health(),
                lambda: store.page_set(pages.keys, pages.sealed()), lambda: store.list_meta(),
                lambda: store.delete(pages.keys), lambda: list(store.scan()),
                lambda: store.register_buffer(memoryview(bytearray(100))),
            ):
                try:
                    call()
                except BackendUnavailable:
                    continue
                raise SystemExit("served after close")
            if lends:
                try:
                    client.call("batch_is_exist", ["x"])
                except BackendUnavailable:
                    print("guarded")
    """
    assert run(url, code)[:2] == (0, "guarded\n")


def test_it_is_quiet_and_ends_by_itself_though_nobody_closed(mooncake_server, url):
    code = """
        store = registry.open(url)
        print(store.page_set(pages.keys, pages.sealed()) == [True] * 8)
    """
    assert run(url, code) == (0, "True\n", "")


def test_the_tools_are_quiet_and_its_log_is_there_for_who_asks(mooncake_server, url, monkeypatch):
    command = [sys.executable, "-c", "from l3store.cli import main; main()", "stat", url]
    with registry.open(url):
        pass  # the marker
    told = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (told.returncode, told.stderr) == (0, "")
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    told = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (told.returncode, "Local segment descriptor" in told.stderr) == (0, True)


@pytest.mark.parametrize("option", ["", "&segment=16MiB"])
def test_a_process_that_ends_while_calls_run_is_not_aborted(mooncake_server, url, option):
    """A thread that comes back from the library after the interpreter's end would do that."""
    code = """
        pages = Pages(count=16, size=200_000)
        sealed = pages.sealed()
        stores = [registry.open(url, raw=True), registry.open(url)]
        turns = threading.Semaphore(0)
        def work(store):
            while True:
                try:
                    store.page_set(pages.keys, sealed)
                    store.page_get(pages.keys, pages.room().pages)
                    store.headers(pages.keys)
                    turns.release()
                except BackendUnavailable:
                    return
        for n in range(6):
            threading.Thread(target=work, args=(stores[n % 2],), daemon=True).start()
        for _ in range(12):
            turns.acquire()
        print("ends")
    """
    assert run(url + option, code) == (0, "ends\n", "")


def test_it_ends_although_the_master_is_dead(mooncake_server, url):
    code = """
        store = registry.open(url)
        store.page_set(pages.keys, pages.sealed())
        print("ready", flush=True)
        sys.stdin.readline()
    """
    with subprocess.Popen(
        [sys.executable, "-c", _HEAD + textwrap.dedent(code), url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        mooncake_server.kill()
        process.stdin.close()
        assert process.wait(30) == 0


def test_an_interrupt_from_the_keyboard_is_one(mooncake_server, url):
    code = """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
        store = registry.open(url)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert run(url, code)[:2] == (0, "interrupted\n")
    code = "store = registry.open(url); signal.raise_signal(signal.SIGTERM); print('survived')"
    assert run(url, code)[:2] == (-signal.SIGTERM, "")


def test_after_a_fork_it_is_refused_and_works_on_in_the_parent(mooncake_server, url):
    """The library's threads are not in the child: a call would never return."""
    code = """
        store = registry.open(url, raw=True)
        store.page_set(pages.keys, pages.sealed())
        child = os.fork()
        if child == 0:
            try:
                store.batch_exists(pages.keys)
            except BackendUnavailable as error:
                if "forked" in str(error) and "spawn" in str(error):
                    try:
                        registry.open(url)
                    except ConfigError as error:
                        os._exit(7 if "spawn" in str(error) else 3)
            os._exit(4)
        signal.alarm(20)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.batch_exists(pages.keys))
    """
    assert run(url, code)[:2] == (0, "7 8\n")


def test_a_forked_child_leaves_the_memory_that_its_parent_lends(mooncake_server, url):
    code = """
        store = registry.open(url + "&segment=16MiB", raw=True)
        store.page_set(pages.keys, pages.sealed())
        child = os.fork()
        if child == 0:
            try:
                store.register_buffer(memoryview(bytearray(4096)))
            except BackendUnavailable as error:
                store.close()
                os._exit(7 if "forked" in str(error) else 3)
            os._exit(4)
        signal.alarm(20)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.batch_exists(pages.keys))
        print(len(store._admin.lent()))
        store.close()
    """
    assert run(url, code)[:2] == (0, "7 8\n2\n")


def test_a_client_that_lends_memory_takes_its_pages_along(mooncake_server, url):
    """And is really ended when its last store closes, so that the memory is free again."""
    code = """
        one = registry.open(url + "&segment=16MiB", raw=True)
        assert not one.capabilities.durable
        two = registry.open(url + "&segment=16MiB", raw=True)
        def lent():
            return one._admin.lent()
        print(len(lent()), one._client is two._client)
        one.close()
        two.page_set(pages.keys, pages.sealed())
        two.close()
        print(len(lent()))
        with registry.open(url + "&segment=16MiB") as again:
            print(again.page_set(pages.keys, pages.sealed()) == [True] * 8)
        memory = []
        gc.disable()
        for _ in range(4):
            with registry.open(url + "&segment=16MiB", raw=True) as again:
                again.page_set(pages.keys, pages.sealed())
            memory.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
        print(max(memory) - min(memory) < 12 << 20)
    """
    assert run(url, code)[:2] == (0, "2 True\n1\nTrue\nTrue\n")


def test_stores_of_one_process_share_a_client_whatever_closes_first(mooncake_server, url):
    code = """
        def threads():
            return len(os.listdir("/proc/self/task"))
        one = registry.open(url, raw=True)
        before = threads()
        two = registry.open(url + "x", raw=True)
        assert threads() == before, "a second client"
        one.page_set(pages.keys, pages.sealed())
        assert two.batch_exists(pages.keys) == 0
        one.close()
        assert two.page_set(pages.keys, pages.sealed()) == [True] * 8
        two.close()
        with registry.open(url, raw=True) as three:
            assert three.batch_exists(pages.keys) == 8
        assert threads() == before, "more threads than one client has"
    """
    assert run(url, code)[0] == 0
