"""The pool's web page: a read-only daemon on the access point.

It reads managers' reports and the job queue, and it changes nothing in the pool.
"""
