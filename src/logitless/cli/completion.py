"""``logitless completion SHELL``: a script that completes commands and options, written from the parsers themselves.

bash: ``logitless completion bash > ~/.local/share/bash-completion/completions/logitless``.
zsh: ``logitless completion zsh > ~/.logitless.zsh``, and ``source ~/.logitless.zsh`` in ``~/.zshrc``.
"""

import argparse
import importlib
from collections.abc import Iterator

from logitless.cli.main import COMMANDS, module_of
from logitless.train.recipe.shipped import shipped_recipes

_SCRIPT = """\
_logitless() {{
    local words="" word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        local below=""
        [ "$COMP_CWORD" -gt 2 ] && below="${{COMP_WORDS[2]}}"
        case "${{COMP_WORDS[1]}} $below" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _logitless logitless
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(script(), end="")
    return 0


def script() -> str:
    """The script for bash; cases of subcommands come before those of their command, because the first match counts."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(module_of(command)).add_arguments(parser)
        for below, words in _words(parser):
            found[f'"{command} {below}"' if below else f'"{command} "*'] = words
    for action in ("show", "copy"):
        found[f'"recipes {action}"'] += shipped_recipes()
    cases = [f'            {pattern}) words="{" ".join(words)}" ;;' for pattern, words in found.items()]
    return _SCRIPT.format(commands=" ".join([*COMMANDS, "--help", "--verbose"]), cases="\n".join(cases))


def _words(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Pairs of a subcommand and the words that may follow it; last the parser's own words, under an empty name."""
    own: list[str] = []
    for action in parser._actions:
        own += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:  # subcommands with a help; the others only name another command
                own.append(listed.dest)
                inner = action.choices[listed.dest]
                yield listed.dest, [word for each in inner._actions for word in each.option_strings]
        elif not action.option_strings and action.choices:
            own += action.choices
    yield "", own
