"""The table of options is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from l3store.backends.file import FileOptions
from l3store.backends.memory import MemoryOptions
from l3store.backends.nvme import NvmeOptions
from l3store.config import StackOptions, parse_duration, parse_size

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROWS = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("stack", StackOptions),
        ("file", FileOptions),
        ("nvme", NvmeOptions),
        ("memory", MemoryOptions),
    ],
)
def test_every_option_and_its_default_is_in_the_table(section, kind):
    shown = {option: default for of, option, default in ROWS if of == section}
    assert list(shown) == list(kind.__struct_fields__)
    for option, default in shown.items():
        value = getattr(kind(), option)
        assert default in (str(value), "by backend") or value in (
            _parsed(parse_duration, default), _parsed(parse_size, default),
        )  # fmt: skip


def _parsed(parse, text):
    try:
        return parse(text)
    except ValueError:
        return None
