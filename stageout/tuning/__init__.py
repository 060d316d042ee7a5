"""Stream counts: policies, adaptive controllers, stream and flow models. Pure: no sockets, no files, no clock.

``docs/developer/tuning.md`` explains which to choose.
"""
