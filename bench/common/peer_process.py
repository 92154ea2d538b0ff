"""A peer in a process of its own, in an environment of its own, made from its published wheels."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from figures import Half

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PeerProcess", "Wheels"]


class Wheels(NamedTuple):
    """What an environment holds."""

    name: str
    alone: tuple[str, ...]
    """Installed without what they ask for: most of that is for GPUs."""
    beside: tuple[str, ...]
    """What they import."""

    def python(self, venvs: str) -> str:
        """Returns the interpreter of the environment, which is made when it is not there."""
        folder = Path(venvs) / self.name
        ready, wanted = folder / "ready", "\n".join([*self.beside, *self.alone])
        python = folder / "bin" / "python"
        if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
            return str(python)
        print(f"making {folder}: {', '.join(self.alone)}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in ([*install, *self.beside], [*install, "--no-deps", *self.alone]):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise SystemExit(f"{' '.join(command)}\n{made.stderr}")
        ready.write_text(wanted, encoding="utf-8")
        return str(python)


class PeerProcess:
    """A peer that is told what to do line by line (`serve` is its other end); it times itself.

    Pages are known by number; a batch is a whole one.

    Args:
        name: What messages call it.
        command: Starts it.
        log: Where what it prints goes.
        batch: Pages of one call.
        environment: Of the process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: str,
        batch: int,
        environment: Mapping[str, str],
    ) -> None:
        self.name, self._batch = name, batch
        self._log = open(log, "w+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment,
        )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, number: int) -> Half:
        """Stores batch `number`."""
        answer = self._ask("put", number)
        if answer["done"] != self._batch:
            raise SystemExit(f"{self.name} did not store a batch{self._said()}")
        return Half(answer["wall"], answer["cpu"])

    def get(self, number: int) -> Half:
        """Reads batch `number`; each byte is compared outside the timed part."""
        answer = self._ask("get", number)
        if answer["done"] != self._batch or answer["wrong"]:
            raise SystemExit(
                f"{self.name} gave {answer['done']} pages back, {answer['wrong']} with a wrong byte"
                + self._said()
            )
        return Half(answer["wall"], answer["cpu"])

    def exists(self, number: int) -> Half:
        """Looks for batch `number`, which is there."""
        answer = self._ask("exists", number)
        if answer["done"] != self._batch:
            raise SystemExit(f"{self.name} does not know a batch that it stored{self._said()}")
        return Half(answer["wall"], answer["cpu"])

    def drop(self) -> None:
        """Takes its files out of the page cache, once the device has them."""
        self._ask("drop")

    def clear(self) -> None:
        """Removes all pages."""
        self._ask("clear")

    def close(self) -> None:
        """Ends it."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()  # the end of its input ends it
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _ask(self, what: str, number: int | None = None) -> dict[str, Any]:
        where = "" if number is None else f" {number * self._batch} {self._batch}"
        if self._process.stdin is None:
            raise SystemExit(f"{self.name} takes no requests")
        try:
            self._process.stdin.write(f"{what}{where}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"{self.name} ended{self._said()}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"{self.name} ended{self._said()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _said(self) -> str:
        self._log.seek(0)
        return "; it said:\n" + self._log.read()[-3000:].decode(errors="replace")
