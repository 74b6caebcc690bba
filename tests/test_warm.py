"""Forks of a process that has imported what takes long are processes of their own."""

import os

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


def test_nothing_passes_from_one_to_the_next_but_what_was_imported_before():
    assert run("-c", "import os, sys; os.environ['ONE'] = '1'; import wave; sys.path.clear()").returncode == 0
    look = "import os, sys; print('ONE' in os.environ, 'wave' in sys.modules, 'colorsys' in sys.modules)"
    assert run("-c", look).stdout == "False False True\n"
