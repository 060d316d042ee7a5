"""Choice of the next batch.

- ``scheduler`` decides what may be sent now. ``planner`` chooses from that (pure), with ``slots``.
- ``retry`` and ``breaker`` decide when a file or a server is tried again.
- ``leases`` are permissions of access points to send.
- ``calls`` shares the files and streams to a server between calls of plugins. ``streams`` loads what chooses them.
"""
