"""Client of the overlay's routers.

:mod:`client` (a file there), :mod:`many` (many files there, small ones in :mod:`packs`), :mod:`fetch` (a file back),
:mod:`operations` (names), :mod:`channel` (one connection).
"""
