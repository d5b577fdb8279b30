"""`instrument completion bash|zsh|fish`: print a script that completes the command `instrument` in a shell.

The script calls this command again when the Tab key is pressed. Verbs, options and their choices are those of the parsers; Hydra
completes overrides, such as `+exp=` and `train.steps=`. It does not complete `python -m instrument`.

Exit codes: 0, the script was printed; 2, the arguments are invalid.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from instrument.commands.verbs import ALL, parser_of

COMPOSED = ("run", "plan", "verify")  # verbs whose arguments are overrides
LINE = "COMP_LINE"  # variable with the command line up to the cursor, as Hydra reads it
QUERY = "query"  # the argument of the scripts; prints one candidate a line, with a description after a tab
SCRIPTS = {
    "bash": """\
_instrument() {
    local line=${COMP_LINE:0:COMP_POINT} word candidate
    word=${line##* }
    COMPREPLY=()
    while IFS=$'\\t' read -r candidate _; do
        [[ $candidate ]] || continue  # no candidates: Bash completes files
        # Bash replaces the part of the word after the last colon or equals sign.
        COMPREPLY+=("${candidate#"${word%"${word##*[:=]}"}"}")
    done < <(COMP_LINE=$line instrument completion query 2> /dev/null)
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]]; then
        compopt -o nospace
    fi
}
complete -o default -F _instrument instrument
""",
    "zsh": """\
_instrument() {
    local -a lines names texts suffix
    lines=("${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT]}" instrument completion query 2> /dev/null)}")
    if [[ -z "$lines" ]]; then
        _files
        return
    fi
    names=("${(@)lines%%$'\\t'*}")
    texts=("${(@)lines/$'\\t'/  }")
    [[ $#names == 1 && $names == *[=./] ]] && suffix=(-S '')
    compadd $suffix -d texts -a names
}
compdef _instrument instrument
""",
    "fish": """\
function __instrument_candidates
    set -lx COMP_LINE (commandline -cp)
    instrument completion query 2> /dev/null
end
complete -c instrument -n __fish_is_first_arg -f
complete -c instrument -a '(__instrument_candidates)'
""",
}


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("completion")
    parser.add_argument("shell", metavar="SHELL", choices=SCRIPTS, help=", ".join(SCRIPTS))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    if [*(sys.argv[1:] if arguments is None else arguments)] == [QUERY]:
        _print_candidates(os.environ.get(LINE, ""))
    else:
        print(SCRIPTS[command_line().parse_args(arguments).shell], end="")
    return 0


def _print_candidates(line: str) -> None:
    """Print the candidates for the last word of a command line. Prints nothing if the shell should complete files."""
    words = line.split()[1:]
    last = words.pop() if words and not line[-1].isspace() else ""
    if words and words[0] in ALL and words[0] not in COMPOSED:
        sys.stdout.writelines(f"{each}\n" for each in _arguments(words[0], words[-1], last) if each.startswith(last))
    elif verbs := [f"{verb}\t{text}" for verb, text in ALL.items() if not words and verb.startswith(last)]:
        print("\n".join(verbs))
    else:
        overrides = words[1:] if words and words[0] in COMPOSED else words
        os.environ[LINE] = " ".join(["instrument", *overrides, last])
        sys.argv = ["instrument", "--shell-completion", "query=fish"]
        from instrument.commands.hydra_main import command
        from instrument.commands.job import job

        command(job)


def _arguments(verb: str, previous: str, last: str) -> Iterator[str]:
    """Yield the choices of the option before the cursor; without such an option, all options or the choices of an argument."""
    parser: argparse.ArgumentParser = import_module(f"instrument.commands.{verb}").command_line()
    actions = parser._actions  # argparse has no public list of them
    for action in actions:
        if previous in action.option_strings and action.choices:
            yield from action.choices
            return
    for action in actions:
        if last.startswith("-"):
            yield from action.option_strings
        elif not action.option_strings and action.choices:
            yield from action.choices


if __name__ == "__main__":
    sys.exit(main())
