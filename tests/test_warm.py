"""Forks of a process that has imported what takes long are processes of their own."""

import fcntl
import os
import sys
import time
from types import SimpleNamespace

import pytest

from tests import warm


def run(*arguments, environment=os.environ, folder=None):
    return warm.run(*arguments, environment=environment, folder=folder, imported=("colorsys",))


def test_what_is_printed_and_the_exit_status_are_as_of_a_new_process(tmp_path):
    (tmp_path / "said.py").write_text("import sys; print(sys.argv[1:]); print(__name__, file=sys.stderr); sys.exit(3)")
    done = run("-m", "said", "one", "two", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "['one', 'two']\n", "__main__\n")
    assert run("-c", "pass").returncode == 0
    raised = run("-c", "raise ValueError('wrong')")
    assert (raised.returncode, raised.stderr.splitlines()[-1]) == (1, "ValueError: wrong")
    stopped = run("-c", "raise SystemExit('no more')")
    assert (stopped.returncode, stopped.stderr) == (1, "no more\n")
    assert run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9


def test_a_process_ends_as_python_does():
    ending = "import atexit, threading, time; atexit.register(print, 'last')\n"
    ending += "threading.Thread(target=lambda: (time.sleep(0.1), print('first'))).start()"
    assert run("-c", ending).stdout == "first\nlast\n"


def test_nothing_passes_from_one_to_the_next_but_what_was_imported_before():
    assert run("-c", "import os, sys; os.environ['ONE'] = '1'; import wave; sys.path.clear()").returncode == 0
    look = "import os, sys; print('ONE' in os.environ, 'wave' in sys.modules, 'colorsys' in sys.modules)"
    assert run("-c", look).stdout == "False False True\n"


def test_a_test_that_is_ended_while_its_process_hangs_takes_no_other_along(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    lock.touch()
    first_process = warm._first_process

    def ended_once_it_hangs():  # as by a deadline of pytest's; what a real signal raises may be lost in a callback
        with lock.open("w") as other:
            while True:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise KeyboardInterrupt from None
                fcntl.flock(other, fcntl.LOCK_UN)
                time.sleep(0.01)

    def first(*arguments):
        process = first_process(*arguments)
        read = SimpleNamespace(readline=ended_once_it_hangs)
        return SimpleNamespace(pid=process.pid, stdin=process.stdin, stdout=read, wait=process.wait)

    first.cache_clear = first_process.cache_clear
    hang = f"import fcntl, os, time; fcntl.flock(os.open({str(lock)!r}, os.O_WRONLY), fcntl.LOCK_EX)\n"
    with monkeypatch.context() as patched:
        patched.setattr(warm, "_first_process", first)
        with pytest.raises(KeyboardInterrupt):
            run("-c", hang + "time.sleep(1000)")
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # until that process is gone
    assert run("-c", "pass").returncode == 0


def test_folders_of_the_python_path_come_before_installed_modules(tmp_path):
    (tmp_path / "wave.py").write_text("here = True")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SAID": "yes"}
    assert (
        run("-c", "import os, wave; print(wave.here, os.environ['SAID'])", environment=environment).stdout
        == "True yes\n"
    )


def test_it_is_this_python(tmp_path):
    assert run("-c", "import sys; print(sys.executable)").stdout == f"{sys.executable}\n"
    assert run("-c", "import os; print(os.getcwd())", folder=tmp_path).stdout == f"{tmp_path.resolve()}\n"
