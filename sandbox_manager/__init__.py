"""Custody of output on an execute point. ``pipeline.py`` is the way of one sandbox: read it first."""
