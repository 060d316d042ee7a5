"""The protocol's rules as pure functions: words and states, the terminal's rule, names, custody, lots."""
