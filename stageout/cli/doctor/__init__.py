"""``stageout doctor``: checks an installation and says what to fix.

``machine`` looks, ``config``, ``node`` and ``pool`` decide from what it saw; ``report`` runs the checks and prints.
"""
