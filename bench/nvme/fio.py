"""fio beside our own figures, where it is installed: only for the reader, no goal hangs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from figures import Figure
from pages import SHAPES, size_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ours import Setting

__all__ = ["fio"]


def fio(setting: Setting) -> Iterator[Figure]:
    """O_DIRECT, as many jobs as our workers, each with one call of a quarter batch at a time.

    Its jobs do not wait for each other after a batch, as a call of ours must.
    """
    program = shutil.which("fio")
    if program is None:
        print("# fio is not installed", file=sys.stderr)
        return
    folder = setting.new_folder("fio")
    for shape in SHAPES:
        block = max(shape.page_bytes, shape.batch_bytes // setting.workers)
        size = setting.capacity // 2 // setting.workers // block * block
        for op in ("write", "read"):
            text = subprocess.run(
                [program, "--name=bench", f"--directory={folder}", f"--rw={op}", f"--bs={block}",
                 f"--size={size}", f"--numjobs={setting.workers}", "--direct=1", "--ioengine=psync",
                 "--group_reporting", "--output-format=json"],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            job = json.loads(text[text.index("{") :])["jobs"][0]
            yield Figure(
                f"fio, {op}, {size_name(block)} a call, {setting.workers} jobs", "GB/s",
                job[op]["bw_bytes"] / 1e9,
            )  # fmt: skip
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
    shutil.rmtree(folder)
