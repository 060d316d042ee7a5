"""Choice of the next batch.

- ``scheduler`` decides what may be sent now. ``planner`` chooses from that (pure), with ``slots`` and ``shares``.
- ``retry`` and ``breaker`` decide when a file or a server is tried again.
- ``leases`` are permissions of access points to send. ``grants`` are streams from the policy service.
- ``tuner`` and ``rates`` choose numbers of files and streams.
"""
