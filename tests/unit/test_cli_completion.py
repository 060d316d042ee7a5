"""Completion scripts: real shells offer every command and option."""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stageout.cli.completion import script
from stageout.cli.main import build_parser
from tests.polling import wait_for

PARSER = build_parser()
(SUB,) = [action for action in PARSER._actions if isinstance(action, argparse._SubParsersAction)]

#: Completes each line of stdin, whose last word is incomplete, and prints what is offered in one line.
_BASH = """
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    case $line in *" ") COMP_WORDS+=("") ;; esac
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _stageout
    echo "${COMPREPLY[*]}"
done
"""
_FISH = """
while read -l line
    set -l words (complete -C "$line" | string split -f 1 \\t)
    echo "$words"
end
"""
#: Zsh completes in its line editor only. compadd is the function that gets what is offered.
_ZSH = r"""
fpath=($PWD/functions $fpath); autoload -Uz compinit; compinit -D
compadd() {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
    local -a offered
    builtin compadd -A offered "$@"
    print -rn -- "${(j: :)offered} " >> $PWD/offered
    builtin compadd "$@"
}
end-line() { print >> $PWD/offered; BUFFER= }
zle -N end-line; bindkey '^X^E' end-line; bindkey '^I' complete-word
touch ready
"""
_TAB_AND_END_LINE = b"\t\x18\x05"


def offered(shell: str, folder: Path, *lines: str) -> list[list[str]]:
    """Return the words that a shell in that directory offers for each line."""
    if shutil.which(shell) is None and not os.environ.get("CI"):
        pytest.skip(f"{shell} is not installed")
    if shell == "zsh":
        return _zsh(folder, *lines)
    text = script(shell) + {"bash": _BASH, "fish": _FISH}[shell]
    given = "".join(f"{line}\n" for line in lines)
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        [shell, "-c", text], input=given, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def _zsh(folder: Path, *lines: str) -> list[list[str]]:
    (folder / "functions").mkdir()
    (folder / "functions" / "_stageout").write_text(script("zsh"))
    (folder / ".zshrc").write_text(_ZSH)
    keyboard, terminal = pty.openpty()
    environment = {**os.environ, "ZDOTDIR": str(folder), "TERM": "dumb"}
    process = subprocess.Popen(
        ["zsh", "-i"], cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    reader = threading.Thread(target=_drain, args=(keyboard,))
    reader.start()
    found = folder / "offered"
    try:
        wait_for((folder / "ready").exists, "the shell to be ready")
        for number, line in enumerate(lines, 1):
            os.write(keyboard, line.encode() + _TAB_AND_END_LINE)
            wait_for(lambda: found.exists() and found.read_text().count("\n") == number, line)  # noqa: B023
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(keyboard)
    return [line.split() for line in found.read_text().splitlines()]


def _drain(keyboard: int) -> None:
    with suppress(OSError):  # the terminal was closed
        while os.read(keyboard, 4096):
            pass


SHELLS = pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])


@SHELLS
def test_every_command_is_offered(shell: str, tmp_path: Path) -> None:
    all_of_them, some = offered(shell, tmp_path, "stageout ", "stageout re")
    assert set(SUB.choices) <= set(all_of_them)
    assert sorted(some) == sorted(name for name in SUB.choices if name.startswith("re"))


@SHELLS
def test_every_option_of_every_command_is_offered(shell: str, tmp_path: Path) -> None:
    wanted = {
        name: {word for one in command._actions if one.help != argparse.SUPPRESS for word in one.option_strings}
        for name, command in SUB.choices.items()
    }
    found = offered(shell, tmp_path, *(f"stageout {name} -" for name in wanted))
    assert {name: set(words) for name, words in zip(wanted, found)} == wanted


@SHELLS
def test_values_are_offered_where_they_are_known(shell: str, tmp_path: Path) -> None:
    (tmp_path / "analysis.sub").touch()
    wanted = {
        "stageout doctor --role ": ["ap", "ep", "pilot", "router"],
        "stageout completion z": ["zsh"],
        "stageout help chec": ["check"],
        "stageout lot re": ["release", "renew", "reserve"],
        "stageout explain ana": ["analysis.sub"],
        "stageout check --token an": ["analysis.sub"],
        "stageout retry -n a": [],
        "stageout retry a": [],
    }
    assert dict(zip(wanted, map(sorted, offered(shell, tmp_path, *wanted)))) == wanted


def test_bash_offers_the_command_s_own_options(tmp_path: Path) -> None:
    assert offered("bash", tmp_path, "stageout --v") == [["--version"]]
