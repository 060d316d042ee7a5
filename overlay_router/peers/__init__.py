"""Who connects and what they may have: keys, rights, limits, TLS, circuits to other routers."""
