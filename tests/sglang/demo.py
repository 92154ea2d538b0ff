"""``make sglang``: the real engine on this machine's CPU, and prompts that come back from L3.

A tiny random model, served by SGLang itself with one rank a process. Each line is one answer to the
same prompt of 600 tokens: where its KV came from, and whether the answer is the one computed cold.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from serving import Answer, Engine, nursery, prompt

_RANKS = {"TP 1": {}, "TP 2": {"tp": 2}, "PP 2": {"pp": 2}}


def main(store: Path) -> None:
    """Shows hits with every topology that two cores can run; leaves the last store behind."""
    print(f"{'':26}{'seconds':>8}{'L1':>6}{'L2':>6}{'L3':>6}  the cold answer")
    extra = {"url": f"nvme://{store}?capacity=256MiB"}
    with nursery() as engines:
        model = engines.model()
        for name, ranks in _RANKS.items():
            shutil.rmtree(store, ignore_errors=True)
            engine = engines.engine().start(model, extra, **ranks)
            cold = _ask(engine, f"{name}, cold")
            _ask(engine, f"{name}, again", cold)
            engine.forget()
            _ask(engine, f"{name}, L1 and L2 flushed", cold)
            engine.kill()
            engine = engines.engine().start(model, extra, **ranks)
            _ask(engine, f"{name}, a new process", cold)
            engine.kill()


def _ask(engine: Engine, what: str, cold: Answer | None = None) -> Answer:
    began = time.perf_counter()
    (answer,) = engine.ask(prompt(1))
    seconds = time.perf_counter() - began
    same = "-" if cold is None else "yes" if answer.said == cold.said else "NO"
    sources = f"{answer.device:6}{answer.host:6}{answer.storage:6}"
    print(f"{what:26}{seconds:8.2f}{sources}  {same}")
    return answer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
