"""The policy service: grants streams between a source and a destination, as leases, over REST.

``lease_table.py`` keeps the leases, and ``api.py`` has the operations for clients.
``docs/administrator/policy-service.md`` explains both.
"""
