"""Client of the overlay's routers.

:mod:`client` (a file there), :mod:`fetch` (a file back), :mod:`operations` (names), :mod:`channel` (one connection).
"""
