"""The table of options is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from l3store.adapters.sglang.options import SGLangOptions
from l3store.backends.file import FileOptions
from l3store.backends.memory import MemoryOptions
from l3store.backends.mooncake import MooncakeOptions
from l3store.backends.nvme import NvmeOptions
from l3store.backends.redis import RedisOptions
from l3store.backends.s3 import S3Options
from l3store.config import StackOptions, parse_duration, parse_size

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROWS = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.M)


NONE = "-"  # an option that is not told has no value
SECTIONS = {
    "stack": StackOptions(),
    "file": FileOptions(),
    "nvme": NvmeOptions(),
    "memory": MemoryOptions(),
    "redis": RedisOptions(),
    "mooncake": MooncakeOptions(),
    "s3": S3Options(),
    "sglang": SGLangOptions(url="must be told"),
}


def test_no_other_section_is_in_the_table():
    assert {of for of, *_ in ROWS if of != "section"} == set(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_and_its_default_is_in_the_table(section):
    options = SECTIONS[section]
    shown = {option: default for of, option, default in ROWS if of == section}
    assert list(shown) == list(options.__struct_fields__)
    for option, default in shown.items():
        value = getattr(options, option)
        told = NONE if value is None else str(value)
        assert default in (told, "by backend") or value in (
            _parsed(parse_duration, default), _parsed(parse_size, default),
        )  # fmt: skip


def _parsed(parse, text):
    try:
        return parse(text)
    except ValueError:
        return None
