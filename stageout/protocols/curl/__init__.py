"""The protocols that libcurl speaks: http, https, dav, davs, ftp, and file."""
