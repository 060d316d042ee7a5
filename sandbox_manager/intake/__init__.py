"""Hand-offs: the socket that plugins speak to, the identity of the peer, admission and acceptance."""
