"""The schedd agent: makes the job queue of one access point tell the truth about stage-out.

``tracker.py`` decides (pure), ``daemon.py`` runs the loop; ``docs/SCHEDD.md`` explains both.
"""
