"""The command line's own part: what is set before a command's imports."""

import gc
import importlib
import importlib.metadata
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from logitless.cli.main import COMMANDS, main

RECIPES = Path(__file__).parents[2] / "recipes"

READ_BACK = """
import os, sys
from logitless.cli.main import main
main(["recipes", "list"])
assert "torch" not in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
"""


def spin_count(**environment):
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", READ_BACK]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise_and_recipes_are_listed_without_torch():
    assert spin_count() == "10000"
    assert spin_count(GOMP_SPINCOUNT="77") == "77"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_it_says_that_a_command_is_loading_and_erases_the_line():
    import pty

    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "logitless", "recipes", "list"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=end, check=True)
    os.close(end)
    assert os.read(terminal, 1000) == b"logitless recipes: loading ...\r\x1b[K"
    os.close(terminal)
    assert b"quickstart" in done.stdout
    silent = subprocess.run(command, capture_output=True, check=True)
    assert silent.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [("--help", 0, "--resume-or-start"), ("no-such.yaml", 2, "needed a readable recipe at no-such.yaml")],
)
def test_help_of_train_and_a_recipe_that_cannot_be_read_need_no_torch(arguments, status, said):
    command = [sys.executable, "-X", "importtime", "-m", "logitless", "train", arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert " logitless.train.recipe.reading\n" in done.stderr
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"bench"}))
def test_help_of_a_command_needs_neither_torch_nor_transformers(command):
    done = subprocess.run([sys.executable, "-c", HELP, command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: logitless {command} " in done.stdout


HELP = """
import sys
from logitless.cli.main import main
try:
    main([sys.argv[1], "--help"])
finally:
    assert not {"torch", "transformers"} & sys.modules.keys()
"""


@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        (["train"], "train.blokcs=3", "nearest: 'train.blocks'"),
        (["train", "--dry-run"], "train.blocks=x", "needs to be a whole number, not 'x'"),
        (["plan", "--gpus", "8"], "train.blokcs=3", "nearest: 'train.blocks'"),
    ],
)
def test_a_recipe_with_a_wrong_key_or_value_is_refused_before_transformers_is_imported(words, change, said):
    command = [sys.executable, "-c", REFUSED, *words, str(RECIPES / "quickstart.yaml"), "--set", change]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr


REFUSED = """
import sys
from logitless.cli.main import main
assert main(sys.argv[1:]) == 2
assert "logitless.train.recipe.config" in sys.modules
assert not {"transformers", "torch._dynamo"} & sys.modules.keys()
"""


def test_without_a_command_it_shows_what_to_begin_with(capsys):
    assert main([]) == 2
    assert "logitless recipes copy quickstart" in capsys.readouterr().err


def test_it_knows_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"logitless {importlib.metadata.version('logitless')}\n"


def test_a_command_that_there_is_not_gets_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian", "recipe.yaml"])
    assert ended.value.code == 2
    assert "there is no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_an_unknown_option_gets_the_nearest_one_of_its_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "recipe.yaml", "--dryrun"])
    assert ended.value.code == 2
    assert "logitless train: error: unknown arguments: --dryrun; did you mean '--dry-run'?" in capsys.readouterr().err


def test_a_recipe_that_comes_along_is_named_where_its_file_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for named, name in (("somewhere/quickstart.yaml", "quickstart"), ("qwen2.5-0.5b-gsm8k", "qwen2.5-0.5b-gsm8k")):
        assert main(["train", named]) == 2
        said = capsys.readouterr().err
        assert "No such file" in said
        assert f"run `logitless recipes copy {name}`, then name recipes/{name}.yaml" in said
    assert main(["recipes", "copy", "length-toy"]) == 0
    for named in ("length-toy", "recipes/lenght-toy.yaml"):
        assert main(["train", named]) == 2
        assert "recipes/length-toy.yaml" in capsys.readouterr().err.partition(" given ")[2]


def test_of_processes_that_torchrun_started_one_says_what_is_wrong_and_again_after_a_restart(
    tmp_path, monkeypatch, capsys
):
    said = []
    for attempt, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        assert main(["train", str(tmp_path / "none.yaml")]) == 2
        said.append("needed a readable recipe" in capsys.readouterr().err)
    assert said == [True, False, True, False]


def test_torchrun_s_last_words_are_the_error_of_its_process(tmp_path, monkeypatch):
    (file := tmp_path / "0" / "error.json").parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    said = str(ChildFailedError("logitless", {0: failure}))
    assert "traceback : needed a readable recipe" in said, said
    assert failure.timestamp > 0
    assert [*file.parent.iterdir()] == [file]


_TORCHS = (
    "CUDA out of memory. Tried to allocate 18.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 9 MiB is free. "
    "Process 1888 has 612.00 MiB memory in use. If reserved but unallocated memory is large try ..."
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(_TORCHS), "CUDA out of memory. Tried to allocate 18.00 MiB"),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for it"), "out of memory"),
    ],
    ids=["a tensor", "CUDA itself"],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_command_for_which_the_gpu_is_too_small_says_who_holds_its_memory_and_what_to_do(
    error, asked, used, monkeypatch, capsys
):
    monkeypatch.setattr("logitless.cli.recipes.run", Mock(side_effect=error))
    monkeypatch.setattr("torch.cuda.is_available", lambda: used)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 8 * 2**30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 3 * 2**30)
    assert main(["recipes", "list"]) == 1
    said = capsys.readouterr().err
    assert asked in said.partition("given ")[2]
    assert ("of 8.00 GiB this process holds 3.00 GiB, others 4.00 GiB. End other processes" in said) == used
    assert "GPU 0 has" not in said
    assert "Search for it" not in said
    assert "logitless doctor RECIPE" in said


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), torch.AcceleratorError("device-side assert")])
def test_an_error_that_is_no_shortage_of_memory_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr("logitless.cli.recipes.run", Mock(side_effect=error))
    with pytest.raises(RuntimeError) as raised:
        main(["recipes", "list"])
    assert raised.value is error


@pytest.mark.gpu
def test_a_run_that_outgrows_the_gpu_ends_with_status_1_and_no_traceback(tmp_path):
    code = "import sys, torch; from logitless.cli.main import main; torch.cuda.set_per_process_memory_fraction(1e-5)\n"
    code += f"sys.exit(main(['train', {str(RECIPES / 'length-toy.yaml')!r}, '--set', 'output={tmp_path}']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "this process holds" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_not_collected_while_a_command_is_imported_and_then_as_before(monkeypatch, was_enabled):
    seen = list[bool]()

    def imported(name: str) -> ModuleType:
        seen.append(gc.isenabled())
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    given = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        main(["recipes", "list"])
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if given else gc.disable)()
    assert seen == [False, was_enabled]  # for its arguments, and to run it
