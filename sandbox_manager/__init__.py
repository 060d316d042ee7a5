"""Custody of output sandboxes on an execute point: accepted from plugins, delivered afterwards, reported truly."""
