"""The overlay's router: `relay` is the way of an operation through it; the folders are explained in docs/OVERLAY.md."""
