"""The plugin's side of a hand-off: offer a job's output to the sandbox manager of this node."""
