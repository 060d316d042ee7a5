"""globusonline and globus on the Globus Transfer service (globus-sdk 4).

Read in this order: :mod:`protocol` (choice of the method for each file of a call), :mod:`taskrun` (one task from
submission to end), :mod:`direct` (HTTPS to a collection). The module :mod:`failures` classifies failures, by code.
"""
