"""HTTP/1.1 on the router's port: a worker reads requests and moves bytes, the daemon decides about names."""
