"""The search for races, on a test that has one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RACED = """
def add(values):
    values.append(1)
"""
TEST = """
import threading

import raced
import tests.races

ended_or_paused, looked = threading.Event(), threading.Event()


class Clock:
    \"\"\"A pause lasts until the test has looked.\"\"\"

    @staticmethod
    def sleep(seconds):
        ended_or_paused.set()
        assert seconds == 7.0
        looked.wait(300)


def test_values(monkeypatch):
    monkeypatch.setattr(tests.races, "time", Clock)
    ended_or_paused.clear(), looked.clear()
    values = []
    thread = threading.Thread(target=lambda: (raced.add(values), ended_or_paused.set()))
    thread.start()
    ended_or_paused.wait(300)
    found = list(values)
    looked.set()
    thread.join()
    assert found == [1]
"""


@pytest.mark.slow
def test_a_race_is_found_at_its_line(tmp_path):
    (tmp_path / "raced.py").write_text(RACED)
    (tmp_path / "test_raced.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.races", "--races", "/raced.py", "--race-seconds", "7"]
    command += ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    failed = [each for each in done.stdout.splitlines() if each.startswith("FAILED")]
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(failed) == 1, done.stdout
    assert f"test_values paused at {tmp_path}/raced.py:3" in failed[0]
    assert "1 failed, 2 passed" in done.stdout  # before it and after it nothing pauses
