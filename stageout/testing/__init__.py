"""Shipped for tests: the conformance suite for plugins, stand-ins, and a real pool on one machine."""
