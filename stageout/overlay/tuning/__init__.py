"""Numbers of connections, and turns of senders. Pure: no sockets, no files, no clock."""
