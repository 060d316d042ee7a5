"""``stageout doctor``: check an installation and print what to fix.

``machine`` examines the machine; ``config``, ``node`` and ``pool`` judge the results; ``report`` runs and prints.
"""
