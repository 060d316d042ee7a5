"""``python -m tests.harness.demo``: the same jobs without and with data slots, every byte checked, and a picture.

Read :mod:`tests.harness.demo.driver` first. Benchmarks use the same parts.
"""
