"""The ``stageout`` command: ``main`` lists the subcommands and imports only the module of the one that runs."""
