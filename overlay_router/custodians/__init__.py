"""Custodians by frames: what they take, keep in a spool, and deliver."""
