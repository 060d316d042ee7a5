"""The job's X.509 proxy where HTCondor does not name it: it sets X509_USER_PROXY for downloads only."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_ATTRIBUTE = re.compile(r'^\s*x509userproxy\s*=\s*"([^"\\]+)"\s*$', re.IGNORECASE | re.MULTILINE)


def name_proxy(environment: MutableMapping[str, str]) -> None:
    """Set X509_USER_PROXY to the proxy that the job's ad names, where nothing has set it and the file is there.

    The starter puts it beside the job's ad, in the scratch directory, whatever directory it was submitted from.

    :param environment: with _CONDOR_JOB_AD; changed.
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
        proxy = os.path.join(os.path.dirname(path), os.path.basename(found[1]))  # what is no path names nothing
        if os.path.isfile(proxy):
            environment["X509_USER_PROXY"] = proxy
