"""The policy service: grants streams between a source and a destination, as leases, over REST.

``book.py`` keeps who has what, ``api.py`` is what clients see, ``docs/TUNING.md`` explains both.
"""
