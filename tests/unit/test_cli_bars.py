"""The lines of a terminal while a file moves."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageout.cli.bars import Bar, cut, drawn, printable
from tests.polling import wait_for

_MB = 10**6


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    assert drawn("f", 5 * _MB, 10 * _MB, 2, 0, 80) == f"f [{'#' * 15:<30}] 50% of 10.0 MB, 2.5 MB/s, 2s left"
    assert drawn("f", 0, 10 * _MB, 65, 65, 80) == "f: waiting for the first byte, 1m05s"
    assert drawn("f", 5 * _MB, 10 * _MB, 60, 12, 80).endswith(" 50% of 10.0 MB, nothing moves, 12s")
    assert drawn("f", _MB, _MB, 60, 12, 80).endswith(" 100% of 1.0 MB, waiting for confirmation, 12s")


@given(st.text(max_size=50), st.integers(0, 3 * _MB), st.integers(0, 2 * _MB), st.integers(0, 200))
def test_it_never_takes_a_second_line(name: str, moved_bytes: int, size_bytes: int, columns: int) -> None:
    text = drawn(printable(name), moved_bytes, size_bytes, 10, 0, columns)
    width = sum(2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char) for char in text)
    assert width < max(1, columns)


def test_a_text_is_cut_between_characters() -> None:
    assert cut("abc", 2) == "ab"
    assert cut("日本語", 5) == "日本"
    assert cut("e\u0301x", 1) == "e\u0301"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_time_is_shown_while_no_byte_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "vt100")
    with Bar("f", _MB):
        wait_for(lambda: "f: waiting for the first byte" in terminal.getvalue())
    assert terminal.getvalue().endswith("\r\033[K"), "the line is removed"
    shown = terminal.getvalue()
    with Bar("f", _MB) as bar:
        bar(_MB // 2)
        bar.end(_MB)
    assert terminal.getvalue() == shown, "nothing is shown at once, or after the end"


def test_nothing_is_shown_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Bar("f", _MB) as bar:
        bar(_MB)
