"""A service in a process of its own, for clients."""

import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def served(model, folder, *options, program=("-m", "logitless.cli.main"), **pipes):
    """Its process and URL; killed at the end."""
    command = [sys.executable, *program, "serve-tinker", str(model), "--port", "0"]
    command += ["--folder", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), **pipes) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
