"""overlay:// URLs: files through the overlay's routers. :mod:`stageout.overlay.client` moves the files."""
