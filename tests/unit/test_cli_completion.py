"""Completion scripts: every command and option is offered, by real shells where they are installed."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest

from stageout.cli.completion import commands_of, script
from stageout.cli.main import build_parser
from stageout.cli.shells import SCRIPTS

PARSER = build_parser()
(SUB,) = [action for action in PARSER._actions if isinstance(action, argparse._SubParsersAction)]

#: Completes each line of stdin, whose last word is incomplete, and prints what is offered in one line.
_DRIVER = """
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    case $line in *" ") COMP_WORDS+=("") ;; esac
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _stageout
    echo "${COMPREPLY[*]}"
done
"""


def bash(*lines: str) -> list[list[str]]:
    """The words that bash offers for each line."""
    text = script("bash") + _DRIVER
    given = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(["bash", "-c", text], input=given, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_every_command_is_offered() -> None:
    all_of_them, some, version = bash("stageout ", "stageout re", "stageout --v")
    assert set(SUB.choices) < set(all_of_them)
    assert some == [name for name in SUB.choices if name.startswith("re")]
    assert version == ["--version"]


def test_every_option_of_every_command_is_offered() -> None:
    wanted = {
        name: {word for one in command._actions if one.help != argparse.SUPPRESS for word in one.option_strings}
        for name, command in SUB.choices.items()
    }
    offered = bash(*(f"stageout {name} -" for name in wanted))
    assert {name: set(words) for name, words in zip(wanted, offered)} == wanted


def test_values_are_offered_where_they_are_known(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analysis.sub").touch()
    assert bash("stageout doctor --role ", "stageout completion z", "stageout help chec", "stageout lot re") == [
        ["ap", "ep", "pilot", "router"],
        ["zsh"],
        ["check"],
        ["reserve", "renew", "release"],
    ]
    assert bash("stageout explain ana", "stageout check --token an", "stageout retry -n a", "stageout retry a") == [
        ["analysis.sub"],
        ["analysis.sub"],
        [],
        [],
    ]


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_shells_can_read_the_script(shell: str) -> None:
    text = script(shell)
    for command in commands_of(PARSER):
        assert command.name in text
        assert all(name.lstrip("-") in text for option in command.options for name in option.names)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=True, timeout=60)
