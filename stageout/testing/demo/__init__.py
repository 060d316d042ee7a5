"""``python -m stageout.testing.demo``: the same jobs without and with data slots, every byte checked, and a picture.

Read :mod:`stageout.testing.demo.driver` first. Benchmarks use the same parts.
"""
