"""Transfer protocols, one package each; the executables in ``plugins/`` name their classes."""
