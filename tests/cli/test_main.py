"""The command line's own part: what is set before a command's imports."""

import os
import subprocess
import sys

READ_BACK = """
import os, sys
from logitless.cli.main import main
assert "torch" not in sys.modules
main(["doctor"])
print(os.environ["GOMP_SPINCOUNT"])
"""


def spin_count(**environment):
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", READ_BACK]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise():
    assert spin_count() == "10000"
    assert spin_count(GOMP_SPINCOUNT="77") == "77"
