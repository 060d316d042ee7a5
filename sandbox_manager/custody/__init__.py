"""Custody: the ledger and its picture in memory, the spool, recovery, and the end of each sandbox.

- ``schema`` has the tables, ``updates`` each change of a row, ``queries`` each question.
- ``ledger`` is the database with its picture in memory (``registry``). It frees the bytes of ended sandboxes.
- ``spool`` holds the files, ``syncing`` brings them to the disk.
- ``orders`` changes states on an agent's word.
- ``quota`` counts bytes in custody, and the state of plugins.
- ``recovery`` brings ledger and spool into agreement at the start. ``housekeeping`` calls it, and has the deadlines.
"""
