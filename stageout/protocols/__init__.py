"""Transfer protocols: one package each, loaded only when a file has to be moved here and now."""
