"""Measurement of servers with real transfers through the installed plugins: the estimator's samples, and profiles.

Read :mod:`carrier` (one measured call of a plugin), then :mod:`estimate` and :mod:`profiler`.
"""
