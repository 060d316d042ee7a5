"""The job's X.509 proxy for uploads. HTCondor sets X509_USER_PROXY for downloads only."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_ATTRIBUTE = re.compile(r'^\s*x509userproxy\s*=\s*"([^"\\]+)"\s*$', re.IGNORECASE | re.MULTILINE)


def name_proxy(environment: MutableMapping[str, str]) -> None:
    """Set X509_USER_PROXY to the proxy in the job's ad, unless it is set or the file is missing.

    The starter puts the proxy into the directory of the job's ad, for any submit directory.

    :param environment: contains _CONDOR_JOB_AD; this function changes it.
    """
    path = environment.get("_CONDOR_JOB_AD")
    if not path or "X509_USER_PROXY" in environment:
        return
    try:
        with open(path, errors="replace") as stream:
            found = _ATTRIBUTE.search(stream.read())
    except OSError:
        return
    if found is not None:
        # an attribute that is no path names no proxy
        proxy = os.path.join(os.path.dirname(path), os.path.basename(found[1]))
        if os.path.isfile(proxy):
            environment["X509_USER_PROXY"] = proxy
