"""Commands that speak with routers of the overlay. :mod:`stageout.cli.main` loads the one that was called."""
