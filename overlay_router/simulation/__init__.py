"""The seeded simulator that tries to break the rules: parties, network, assertions."""
