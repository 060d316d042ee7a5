"""The client of a router's HTTP: connections, ranges, uploads, downloads and trees."""
