"""``logitless completion``: bash itself completes with the script."""

import shutil
import subprocess

import pytest

from logitless.cli.main import COMMANDS, main

ASK = """
source /dev/stdin
COMP_WORDS=({words}) COMP_CWORD={last}
_logitless
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        printed = []
        patched.setattr("builtins.print", lambda text, end="\n": printed.append(text + end))
        assert main(["completion", "bash"]) == 0
    return "".join(printed)


def completed(script, *words):
    quoted = " ".join(f"'{word}'" for word in ("logitless", *words))
    ask = ASK.format(words=quoted, last=len(words))
    bash = shutil.which("bash")
    done = subprocess.run([bash, "-c", ask], input=script, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="completes in bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tr",), ["train"]),
        (("",), [*COMMANDS, "--help", "--verbose"]),
        (("train", "--dr"), ["--dry-run"]),
        (("train", "recipe.yaml", "--res"), ["--resume", "--resume-or-start"]),
        (("recipes", "co"), ["copy"]),
        (("recipes", "show", "quick"), ["quickstart"]),
        (("train", "recip"), []),  # bash itself goes on with names of files
        (("completion", "z"), ["zsh"]),
    ],
)
def test_commands_options_and_recipes_are_completed(script, words, expected):
    assert completed(script, *words) == expected


def test_zsh_gets_the_same_through_its_bash_mode(script, capsys):
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert "bashcompinit" in printed.splitlines()[0]
    assert printed.endswith(script)
