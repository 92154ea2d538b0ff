"""docs/sglang.md, "Try it without a GPU": its commands, as they stand there, run and show hits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 240
"""To start: a minute on an idle machine."""


@pytest.fixture
def commands(tmp_path):
    """What serves, and what asks: as the page says, but with a folder and a port of its own."""
    if missing := [tool for tool in ("bash", "curl", "jq") if which(tool) is None]:
        absent = f"not on this machine: {', '.join(missing)}"
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(absent)
        pytest.skip(absent)
    page = (ROOT / "docs/sglang.md").read_text(encoding="utf-8")
    told = page[page.index("To serve over HTTP") : page.index("The second answer has")]
    serves, asks = told.split("When it is ")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / ".data").mkdir()
    (tmp_path / ".venv-sglang").symlink_to(sys.prefix)

    def command(text):
        lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
        return "\n".join(lines).replace("localhost:30000", f"127.0.0.1:{port}")

    # "--port" goes where a user's own flags go; the backup has longer than an idle machine needs.
    return (
        command(serves).replace("--enable-metrics", f"--enable-metrics --port {port}"),
        command(asks).replace("sleep 2", "sleep 8"),
        f"http://127.0.0.1:{port}",
    )


@contextmanager
def served(command, folder, url):
    """Runs what serves until the block ends; it is ready then."""
    log = folder / "log"
    with (
        log.open("w") as told,
        subprocess.Popen(
            ["bash", "-euc", command], cwd=folder, stdout=told, stderr=told, start_new_session=True
        ) as process,
    ):
        try:
            until = time.monotonic() + SECONDS
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > until:
                    pytest.fail(f"SGLang does not serve:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.timeout(SECONDS + 120)
def test_the_page_is_true(commands, tmp_path):
    serves, asks, url = commands
    with served(serves, tmp_path, url) as log:
        done = subprocess.run(
            ["bash", "-euc", asks], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        (tokens, cold), (again, warm) = (
            json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")
        )
        assert (len(tokens), again) == (8, tokens)
        assert not cold
        assert (warm["storage"], warm["device"], warm["host"]) == (592, 0, 0)
        assert "37" in done.stdout.rsplit("\n[", 1)[1]  # pages that `l3store ls` counts
        assert "pool kv (in place)" in log.read_text()
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as metrics:
            lines = metrics.read().decode().splitlines()
        (hits,) = (line for line in lines if 'cache_source="storage"' in line)
        assert (hits.startswith("sglang:cached_tokens_total"), hits.split()[-1]) == (True, "592.0")
