"""Tests for authors of transfer plugins: the conformance suite, places for files, and the embedded starter."""

__all__ = ["conformance", "endpoints", "starter"]
