"""One batch: the files that a plugin is called for, the outcome of the call, and the hand-over to a custodian."""
