"""The one module that reads the environment."""

from __future__ import annotations

import pytest

from recinfer import env


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), (" Off ", False), ("no", False)]
)
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("RECINFER_DEBUG", value)
    assert env.debug() is on


def test_debug_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECINFER_DEBUG", raising=False)
    assert env.debug() is False


def test_a_child_gets_this_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECINFER_DEBUG", "1")
    child = env.child_environment(RECINFER_DEBUG="0", OTHER="x")
    assert (child["RECINFER_DEBUG"], child["OTHER"]) == ("0", "x")
    assert "PATH" in child
    assert env.debug() is True
