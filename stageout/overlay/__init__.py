"""Client of the overlay's routers: :mod:`client` (whole files there and back), :mod:`channel` (one connection)."""
