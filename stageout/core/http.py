"""Short HTTP exchanges that are no transfers: with the policy service, and with an access point's credential port."""

from __future__ import annotations

import ssl
from typing import NoReturn

_MOST_BYTES = 65_536


def exchange(
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    timeout_s: float,
    token: str = "",
    certificate: str = "",
    most_bytes: int = _MOST_BYTES,
) -> tuple[int, bytes]:
    """Send one request on a connection of its own, and wait for its answer. Blocks.

    Proxies and ``.netrc`` of the environment do not count. A redirection is an answer like any other, so that a token
    goes nowhere else.

    :param body: JSON. :param timeout_s: of connecting, and of each wait for bytes. :param token: bearer token.
    :param certificate: SHA-256 of the only certificate that counts, hexadecimal; "": the system's authorities vouch
        for the server. :returns: status and content, which is cut to ``most_bytes``.
    :raises OSError: there is no answer, or the server's certificate does not count.
    """
    import requests  # 0.1 s: few who load this module ask anything
    import urllib3

    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    adapter = requests.adapters.HTTPAdapter()
    directory = ssl.get_default_verify_paths().capath  # counts as well as the file does
    adapter.poolmanager = urllib3.PoolManager(1, assert_fingerprint=certificate or None, ca_cert_dir=directory)
    try:
        with requests.Session() as session:
            session.trust_env = False
            session.mount("https://", adapter)
            answer = session.request(
                method, url, data=body, headers=headers, timeout=timeout_s, allow_redirects=False, stream=True,
                verify=False if certificate else _authorities(),
            )  # fmt: skip
            return answer.status_code, answer.raw.read(most_bytes, decode_content=True)
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as problem:
        _raise_cause(problem)


def _authorities() -> str:
    """Return the system's certificates, which administrators extend; those of requests are its own."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or "/etc/ssl/certs"


def _raise_cause(problem: BaseException) -> NoReturn:
    """Raise the kernel's or OpenSSL's error behind an error: its text is a sentence, that of requests is not."""
    while problem.__context__ is not None:
        problem = problem.__context__
    raise problem if isinstance(problem, OSError) else OSError(str(problem) or type(problem).__name__) from None
