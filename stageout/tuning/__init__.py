"""Stream counts: policies, adaptive controllers, stream and flow models. Pure: no sockets, no files, no clock.

``servers`` is the chooser that the manager loads. ``policy_grants`` and ``policy_client`` ask the policy service.

``docs/developer/tuning.md`` explains which to choose.
"""
