from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files are written here, and none of them has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
