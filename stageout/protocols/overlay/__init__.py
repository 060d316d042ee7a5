"""overlay:// URLs: files through the overlay's routers. The way of a file is in :mod:`stageout.overlay.client`."""
