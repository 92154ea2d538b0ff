"""Which weights a model path holds: a fingerprint of the files, the same on every machine.

A page is only right for the weights that computed it, and neither a served name nor a path names
them: fine-tunes of one base are served under one name and have equal geometry, and training jobs
write new weights to an old path. The fingerprint reads each weight file's length and blocks spread
evenly over it, 4,096 in all, and the model's configuration: 16 MiB for any model. What changes a
few matrices of every layer is seen (a merged adapter); a change between the blocks is not.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fingerprint"]

_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_CONFIGS = ("config.json", "params.json", "adapter_config.json")  # the second is Mistral's own
_BLOCKS, _LEAST_A_FILE = 4096, 16
_BLOCK_BYTES = 4096
_DIGITS = 20


def fingerprint(path: Path) -> str | None:
    """Returns a digest of the weight files in the folder (or of the file) `path`.

    Blocks for the reads. None when there are none, for example behind a remote loader.

    Raises:
        OSError: A weight file cannot be read.
    """
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES)
    if not files:
        return None
    # The same weights under another rope scaling make other KV, as does an adapter's scale.
    configs = (path / name for name in _CONFIGS)
    files += [config for config in configs if config.is_file()]
    blocks = max(_LEAST_A_FILE, _BLOCKS // len(files))
    state = hashlib.sha256(b"l3store.weights.1")
    for file in files:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            state.update(size.to_bytes(8, "little"))
            count = min(blocks, size // _BLOCK_BYTES + 1)  # as many hold a small file whole
            for i in range(count):
                state.update(os.pread(opened.fileno(), _BLOCK_BYTES, size * i // count))
            state.update(os.pread(opened.fileno(), _BLOCK_BYTES, max(0, size - _BLOCK_BYTES)))
    return state.hexdigest()[:_DIGITS]
