"""http, https, ftp, file, dav and davs on libcurl.

Read in this order: :mod:`protocol` (choice of the transfer), :mod:`attempts` (retries), :mod:`download` and
:mod:`upload` (one file), :mod:`transport` (one request). Every failure is classified in :mod:`failures`.
"""
