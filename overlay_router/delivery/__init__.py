"""Delivery by transfer plugins, and leases for gateways that share a place."""
