"""The overlay's router. So far its pure protocol core and the simulator that tests it (docs/OVERLAY.md)."""
