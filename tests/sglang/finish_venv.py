"""Run by the Python of `.venv-sglang`, once its packages are there: makes sglang start on a CPU.

Every interpreter of the venv starts with `support/` on its path, engine processes included: the
stand-ins must be there before sglang is imported, and sglang finds the copies that replace its GPU
kernels by the entry point of an installed distribution.

Then sglang is imported once for the bytecode of what it uses (pip would compile ten times as much),
and meanwhile the extension in which it hashes pages is built.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent / "support"
USED = [
    "hypothesis",
    "pytest",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.models.llama",
    "transformers.models.llama.modeling_llama",
    "xgrammar",
]


def main() -> None:
    write_files()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.dont_write_bytecode = False  # whatever the environment says
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SUPPORT))
    importlib.import_module("sglang_on_cpu").watch()
    hashing = importlib.import_module("sglang.srt.mem_cache.utils")
    with ThreadPoolExecutor() as pool:
        built = pool.submit(hashing.get_hash_str, [1, 2], None, 1)
        for module in USED:
            importlib.import_module(module)
        if built.exception():
            print("sglang's page hash needs g++ and the headers of Python and OpenSSL to compile,")
            print("see apt-packages.txt")
        built.result()


def write_files() -> None:
    site = Path(sysconfig.get_path("purelib"))
    start = f"{SUPPORT}\nimport sglang_on_cpu; sglang_on_cpu.watch()\n"
    (site / "sglang_on_cpu.pth").write_text(start)
    distribution = site / "sglang_on_cpu-1.dist-info"
    distribution.mkdir(exist_ok=True)
    (distribution / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang-on-cpu\nVersion: 1\n"
    )
    (distribution / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsglang_on_cpu = sglang_on_cpu.kvcacheio:install\n"
    )


if __name__ == "__main__":
    main()
