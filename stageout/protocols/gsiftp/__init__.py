"""gsiftp and ftp through globus-url-copy.

Read in this order: :mod:`protocol` (a batch), :mod:`program` (one run of the program), :mod:`dialogue` (the servers'
answers), :mod:`replies` (the meaning of an answer), :mod:`proxy` (X.509 proxy certificates).
"""
