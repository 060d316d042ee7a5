"""HTCondor's Python bindings: how they are loaded, and the one class for all their errors.

Importing this module loads no bindings: they cost more than the rest of a short command, and a plugin or a router runs
without them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageout.core.errors import StageoutError

#: Dpkg's list of the files of the Debian package, and a file of both packages (tools/packages/nfpm.yaml).
DPKG_LIST, PACKAGED = "/var/lib/dpkg/info/stageout.list", "/usr/share/condor/config.d/10-stageout.conf"


class CondorError(StageoutError):
    """A daemon of HTCondor did not answer or refused, or the bindings cannot read a text; the text says why."""


class BindingsMissing(CondorError):
    """HTCondor's Python bindings are not installed here; the text says how to install them."""


def htcondor() -> Any:
    """Load the module ``htcondor2``. :raises BindingsMissing: it is not installed."""
    try:
        import htcondor2
    except ImportError:
        raise BindingsMissing(f"HTCondor's Python bindings are missing here; {_installation()}.") from None
    return htcondor2


def classad() -> Any:
    """Load the module ``classad2``. :raises BindingsMissing: it is not installed."""
    try:
        import classad2
    except ImportError:
        raise BindingsMissing(f"HTCondor's Python bindings are missing here; {_installation()}.") from None
    return classad2


def are_installed() -> bool:
    """Tell whether the bindings can be loaded, without loading them."""
    return importlib.util.find_spec("htcondor2") is not None


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Raise :class:`CondorError` in place of the bindings' exceptions."""
    try:
        yield
    except _exceptions() as problem:
        raise CondorError(str(problem) or type(problem).__name__) from None


def _exceptions() -> tuple[type[Exception], ...]:
    """Return the bindings' exceptions. HTCondor 23 has no classes of its own for them, 25 has two."""
    own = (getattr(htcondor(), "HTCondorException", None), getattr(classad(), "ClassAdException", None))
    return (OSError, RuntimeError, ValueError, TypeError, KeyError, SyntaxError, *(found for found in own if found))


def _installation() -> str:
    """Say how to install the bindings, in the way in which stageout itself was installed here.

    Debian's condor contains them; RPMs have them apart. Those of pip would differ from the daemons' version.
    """
    if Path(DPKG_LIST).exists():
        return "install HTCondor's own package, which has them: apt install condor"
    if Path(PACKAGED).exists():
        return "install HTCondor's own package of them: dnf install python3-condor"
    return "install the package as 'stageout[condor]'"
