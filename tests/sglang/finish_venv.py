"""Run by the Python of `.venv-sglang`, once its packages are there: makes sglang start on a CPU.

Every interpreter of the venv starts with `support/` on its path, engine processes included: the
stand-ins must be there before sglang is imported, and sglang finds the copies that replace its GPU
kernels by the entry point of an installed distribution.

Then sglang is imported once for the bytecode of what it uses (pip would compile ten times as much),
while the extension in which it hashes pages is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent / "support"
IMPORTS = (
    "import xgrammar, hypothesis, pytest, sglang.srt.entrypoints.engine, transformers, torch;"
    "import sglang.srt.managers.scheduler, sglang.srt.mem_cache.unified_radix_cache;"
    "import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller, torch.distributed;"
    "from transformers import LlamaConfig, LlamaForCausalLM;"
    "from sglang.srt.models import llama, registry"
)
HASHES = "from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1, 2], None, 1)"


def main() -> int:
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

    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    runs = [subprocess.Popen([sys.executable, "-c", code], **quiet) for code in (HASHES, IMPORTS)]
    said = [run.communicate()[0] for run in runs]
    for run, text in zip(runs, said, strict=True):
        if run.returncode:
            print(text, "sglang cannot be imported, or cannot compile its page hash (which needs")
            print("g++ and the headers of Python and OpenSSL: see apt-packages.txt)")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
