"""The transfer plugin protocol, written once. An executable declares its abilities and names its protocol class::

    #!/usr/bin/env python3
    from stageout.plugin import Abilities, run

    run(Abilities(methods=("demo",), version="1.0"), "package.module:ProtocolClass")

Nothing but this file and :mod:`stageout.plugin.query` is loaded for ``-classad``: HTCondor asks for every job.
"""

from __future__ import annotations

import os
import sys

from stageout.plugin.abilities import Abilities

TYPE_CHECKING = False  # type checkers recognize this name; typing itself is too slow to import here
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["Abilities", "run"]


def run(abilities: Abilities, protocol: str) -> NoReturn:
    """Run the plugin: process the command line and end the process with the right status.

    :param abilities: the answer to ``-classad``.
    :param protocol: ``"module:Class"``, a TransferProtocol or BatchProtocol of :mod:`stageout.plugin.api`; imported
        only when the plugin itself has to move a file (``"__main__:Class"`` for a class in the executable itself).
    """
    if sys.argv[1:] in (["-classad"], ["-classad", "-sources"]):
        from stageout.plugin.query import answer

        status = answer(abilities, "-sources" in sys.argv)
    elif sys.argv[1:] == ["--version"]:
        print(sys.argv[0].rpartition("/")[2], abilities.version)
        status = 0
    else:
        import gc

        gc.disable()  # the collector scans all imported objects repeatedly; a transfer enables it
        from stageout.plugin.session import main

        status = main(abilities, protocol, sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # hanging threads of a transfer, and the interpreter's clean-up, must not hold the slot
