"""Runs in these tests end without their report: drawing it takes ten times as long as a tiny run."""

import pytest


@pytest.fixture(autouse=True)
def without_report(monkeypatch):
    """Leave ``report.html`` out; a test that wants it puts ``write_report`` back."""
    monkeypatch.setattr("logitless.train.run.write_report", lambda path: None)
