"""Transfer protocols: one package each, imported only when the plugin itself has to move a file."""
