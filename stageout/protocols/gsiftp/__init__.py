"""gsiftp and ftp through globus-url-copy.

Read in this order: :mod:`protocol` (the way of a batch), :mod:`program` (one run of the program), :mod:`dialogue` (what
the servers answered), :mod:`replies` (what an answer means), :mod:`proxy` (X.509 proxy certificates).
"""
