"""The ``stageout`` command. ``main`` knows the subcommands and loads only the one that was called."""
