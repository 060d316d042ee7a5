"""The door to HTCondor's bindings: one class of errors, and what a schedd is asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import classad2
import htcondor2
import pytest

from stageout.condor import bindings
from stageout.condor.ads import Expression, read_old
from stageout.condor.bindings import BindingsMissing, CondorError
from stageout.condor.schedd import Schedd

_OWN = [getattr(htcondor2, "HTCondorException", RuntimeError), getattr(classad2, "ClassAdException", ValueError)]


@pytest.mark.parametrize("kind", [OSError, RuntimeError, ValueError, TypeError, KeyError, SyntaxError, *_OWN])
def test_each_exception_of_the_bindings_becomes_one(kind: type[Exception]) -> None:
    with pytest.raises(CondorError, match="refused"), bindings.faults():
        raise kind("refused")


def test_an_exception_without_text_is_named() -> None:
    with pytest.raises(CondorError, match=r"^OSError$"), bindings.faults():
        raise OSError


def test_faults_of_our_own_stay() -> None:
    with pytest.raises(ZeroDivisionError), bindings.faults():
        raise ZeroDivisionError


def test_bindings_without_classes_of_their_own_are_those_of_htcondor_23(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("htcondor2", "classad2"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    with pytest.raises(CondorError, match="silent"), bindings.faults():
        raise RuntimeError("silent")


@pytest.mark.parametrize(("name", "load"), [("htcondor2", bindings.htcondor), ("classad2", bindings.classad)])
def test_missing_bindings_are_named_with_a_remedy(name: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BindingsMissing, match=r"^HTCondor's Python bindings are missing here; install "):
        load()


@pytest.fixture
def schedd(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A schedd that takes the calls of the real one."""
    made = create_autospec(htcondor2.Schedd, instance=True)
    made.edit.return_value = 1
    monkeypatch.setattr(htcondor2, "Schedd", lambda: made)
    return made


@pytest.mark.parametrize(
    ("more", "flags"),
    [({}, 0), ({"is_logged": True}, int(htcondor2.TransactionFlag.ShouldLog)), ({"is_of_cluster": True}, 128)],
)
def test_an_edit_carries_its_flags(more: dict[str, bool], flags: int, schedd: Any) -> None:
    assert Schedd().edit(["7.0"], "A", "1", **more) == 1
    ((_, given),) = schedd.edit.call_args_list
    assert int(given.get("flags", 0)) == flags


def test_a_query_asks_for_clusters_only_when_told(schedd: Any) -> None:
    schedd.query.return_value = []
    Schedd().query("true", ["ClusterId"], limit=1)
    Schedd().query("true", ["ClusterId"], with_clusters=True)
    plain, with_clusters = (call.kwargs for call in schedd.query.call_args_list)
    assert plain == {"limit": 1}
    assert with_clusters == {"opts": htcondor2.QueryOpt.IncludeClusterAd}


def test_a_history_that_breaks_off_is_one_error(schedd: Any) -> None:
    def broken(*_: object) -> Any:
        yield classad2.ClassAd({"ClusterId": 7})
        raise RuntimeError("Failed to read")

    schedd.history.side_effect = broken
    found = Schedd().history("true", [], -1, since="ClusterId < 7")
    assert next(found)["ClusterId"] == 7
    with pytest.raises(CondorError, match="Failed to read"):
        next(found)
    assert isinstance(schedd.history.call_args.args[3], classad2.ExprTree)


@pytest.mark.parametrize("text", ["1 +", "(", ""])
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(CondorError):
        Expression(text)


@pytest.mark.parametrize(
    ("text", "holds", "value", "shown"),
    [
        ("A == 7", True, True, "true"), ("A > 7", False, False, "false"), ("B", False, None, "undefined"),
        ("A + error", False, None, "error"), ('"yes"', False, "yes", "yes"), ("A", True, 7, "7"),
    ],
)  # fmt: skip
def test_an_expression_over_a_record(text: str, holds: bool, value: object, shown: str) -> None:
    found = Expression(text)
    assert (found.holds("A = 7\n"), found.value("A = 7\n"), found.text("A = 7\n")) == (holds, value, shown)


def test_an_ad_in_the_old_syntax_is_read_with_plain_values() -> None:
    assert read_old('A = 3 + 4\nB = "x"\nC = D\n') == {"A": 7, "B": "x"}
