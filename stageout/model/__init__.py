"""Records of output in custody: a sandbox and its files. States and their moves are in ``stageout/core/states.py``."""
