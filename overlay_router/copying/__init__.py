"""Copies to other routers that somebody commanded."""
