"""globusonline and globus on the Globus Transfer service (globus-sdk 4).

Read in this order: :mod:`protocol` (which way each file of a call goes), :mod:`taskrun` (one task from submission to
end), :mod:`direct` (HTTPS to a collection). The module :mod:`failures` classifies failures, by code.
"""
