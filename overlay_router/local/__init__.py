"""The terminal: a tree below a root, its database, and operations executed once."""
