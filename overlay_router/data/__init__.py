"""The data plane: processes that move bytes between sockets and files."""
