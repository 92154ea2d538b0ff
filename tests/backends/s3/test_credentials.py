"""Credentials that a program gives: wrong from the start, and gone in the middle."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from l3store import registry
from l3store.errors import BackendUnavailable, ConfigError
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.s3._stub import Stub


@pytest.fixture
def says(monkeypatch, tmp_path) -> Callable[[str], object]:
    """What the program of the profile ``program`` answers from now on."""
    answer, program, config = tmp_path / "answer", tmp_path / "program", tmp_path / "config"
    program.write_text(f"#!/bin/sh\ncat {answer}\n")
    program.chmod(0o700)
    config.write_text(f"[profile program]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    return answer.write_text


@pytest.fixture
def url(stub: Stub, client: str) -> str:
    return f"s3://bucket/program-{client}?endpoint={stub.endpoint}&profile=program&client={client}"


def keys(seconds: float) -> str:
    """An answer that is good for so long."""
    until = datetime.now(UTC) + timedelta(seconds=seconds)
    return json.dumps({
        "Version": 1, "AccessKeyId": "a", "SecretAccessKey": "sesame",
        "Expiration": until.isoformat(),
    })  # fmt: skip


WRONG = [keys(-60), "no JSON", "[]", "{}", '{"Version": 1}', keys(60).replace("20", "soon ")]


@pytest.mark.parametrize("answer", WRONG)
def test_wrong_ones_are_told_at_opening(says, url, answer):
    says(answer)
    with pytest.raises(ConfigError, match="credentials") as caught:
        registry.open(url)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("answer", WRONG[:3])
def test_when_they_are_not_renewed_the_store_is_away_until_they_are(says, url, client, answer):
    says(keys(3600))
    with registry.open(url, raw=True) as store:
        pages = Pages(count=1)
        store.page_set(pages.keys, pages.sealed())
        source = store._requests.tools._credentials
        source._expiry_time = datetime.now(UTC) - timedelta(seconds=1)
        if client == "obstore":
            store._requests.client._credentials._renew_at = 0.0
            time.sleep(0.2)  # obstore asks for them again 0.1 s after the last time
        says(answer)
        for call in (
            lambda: store.page_get(pages.keys, pages.room().pages),
            lambda: store.page_set(pages.keys, pages.sealed()),
            lambda: store.batch_exists(pages.keys),
            lambda: store.get_meta("a"),
            store.list_meta,
            store.details,
            store.health,
        ):
            with pytest.raises(BackendUnavailable, match="credentials"):
                call()
        says(keys(3600))
        assert store.page_get(pages.keys, pages.room().pages) == [True]
