"""http, https, ftp, file, dav and davs on libcurl.

Read in this order: :mod:`protocol` (who moves what), :mod:`attempts` (retries), :mod:`download` and :mod:`upload`
(the way of one file), :mod:`transport` (one request). Every failure is classified in :mod:`failures`.
"""
