"""What file system a folder lies on."""

from __future__ import annotations

import os

__all__ = ["file_system"]


def file_system(path: str) -> str:
    """Returns the type of the file system that `path` lies on, such as ``ext4``; empty: unknown."""
    path = os.path.realpath(path)
    found = ("", "")
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                _, mount, kind, *_ = line.split()
                mount = mount.encode().decode("unicode_escape")  # spaces are written \040
                inside = path == mount or path.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(found[0]):  # a later mount lies over an earlier
                    found = (mount, kind)
    except OSError:
        return ""
    return found[1]
