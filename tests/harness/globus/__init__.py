"""A Globus of our own for tests and benchmarks: Auth, Transfer and the HTTPS side of collections, over directories.

It speaks as the public service does and moves real bytes; each fault can be provoked; its data survive
its own restart. Nothing of it is meant to keep anybody out: it listens on the loopback address only.

>>> with Emulator(Path("/tmp/somewhere")) as globus:                          # doctest: +SKIP
...     archive = globus.collection("archive")                                # a directory, and a UUID for it
...     token = globus.token(TRANSFER)                                        # what a job would get
...     globus.change(archive.id, offline=True)                               # and so on: see Collection and Refusal
"""

from tests.harness.globus.emulator import Emulator
from tests.harness.globus.world import GUEST, MAPPED, TRANSFER, Collection, Refusal, Task

__all__ = ["GUEST", "MAPPED", "TRANSFER", "Collection", "Emulator", "Refusal", "Task"]
