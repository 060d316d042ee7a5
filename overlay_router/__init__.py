"""The overlay's router: `relay` shows the way of an operation; docs/developer/overlay.md explains the folders."""
