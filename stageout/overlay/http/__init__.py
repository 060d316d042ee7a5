"""HTTP/1.1 as routers speak it: heads, framing, ranges, digests and names. No I/O."""
