"""Records of output in custody: a run, its sandbox, files and batches. ``stageout/core/states.py`` has their states."""
