"""The schedd agent: tracks stage-out for the jobs of one schedd.

``daemon.py`` runs the loop, ``agent.py`` is one pass over all jobs, and ``decisions.py`` decides about one job (pure).
``edits.py`` turns a decision into attributes. ``docs/developer/agent.md`` explains them.
"""
