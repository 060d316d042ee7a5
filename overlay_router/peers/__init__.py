"""The peers and their rights: keys, rights, limits, TLS, circuits to other routers."""
