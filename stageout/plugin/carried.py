"""Data that accompanies handed-off files: the credentials of their URLs, PluginData, attributes of the job's ad.

The plugin reads it at the end of the job, as the job's user, because it is deleted with the job. The plugin imports
this module only when files have such data.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stageout.core.classads import ClassAd, unparse_ad
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.handoff.client import Carried
from stageout.plugin.abilities import Abilities
from stageout.plugin.context import PluginEnvironment, credential_name
from stageout.plugin.requests import Item
from stageout.plugin.urls import split_scheme
from stageout.wire import handoff as wire

ALL = "*"
"""Among ``Abilities.credentials``: all tokens that came with the job, and its proxy, whatever the URLs name."""


def carried(abilities: Abilities, items: Sequence[Item], environment: PluginEnvironment) -> Carried:
    """Collect the data that the plugin will need again for these uploads.

    :raises TransferFailure: a credential cannot be read, or the files need different values.
    """
    found = [(kind, service, _content(path)) for kind, service, path in _credentials(abilities, items)]
    offered = tuple(wire.OfferedCredential(kind, service, len(content)) for kind, service, content in found)
    job = environment.ad("_CONDOR_JOB_AD") if abilities.job_attributes else ClassAd()
    wanted = ClassAd({name: job[name] for name in abilities.job_attributes if name in job})
    ads = [unparse_ad(ad) if ad else "" for ad in (wanted, _plugin_data(items))]
    if any(len(text) > wire.MAX_ADS_CHARS for text in ads):
        raise _cannot(f"PluginData has more than {wire.MAX_ADS_CHARS} characters")
    return Carried(wire.TransferContext(offered, *ads), [content for _, _, content in found])


def _credentials(abilities: Abilities, items: Iterable[Item]) -> Iterator[tuple[str, str, Path]]:
    """Yield kind, service and file of each credential that the URLs of this call need, and no other."""
    folder = os.environ.get("_CONDOR_CREDS", "")
    named, proxy, services = set(), False, abilities.credentials
    if ALL in services:
        named, proxy, items, services = _tokens_in(folder), True, (), ()
    for item in items:
        scheme = split_scheme(item.request.url)
        if scheme.service:
            named.add(credential_name(scheme.service, scheme.handle))
        elif item.method in abilities.proxy_methods:
            proxy = True
    if named and not folder:
        raise _unreadable(f"no credentials came with this job; ask for them with use_oauth_services = {min(named)}")
    for name in sorted(named.union(*(_tokens_of(service, folder) for service in services))):
        if not wire.is_service(name):
            raise _unreadable(f"the credential's name {name!r} has characters other than letters, digits, _ and -")
        yield "token", name, Path(folder) / f"{name}.use"
    path = os.environ.get("X509_USER_PROXY", "")
    if proxy and path:
        yield "proxy", "", Path(path)


def _tokens_of(service: str, folder: str) -> set[str]:
    """List the names of all tokens of a service that came with the job."""
    found = {name for name in _tokens_in(folder) if name == service or name.startswith(f"{service}_")}
    if not found:
        raise _unreadable(f"no credential of {service} came with this job; use_oauth_services = {service}")
    return found


def _tokens_in(folder: str) -> set[str]:
    return {path.stem for path in Path(folder).glob("*.use")} if folder else set()


def _content(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise _unreadable(f"cannot read the credential {path.name}: {problem.strerror}") from None
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _unreadable(f"the credential {path.name} is not a regular file")
        content = stream.read(wire.MAX_CREDENTIAL_BYTES + 1)
    if not content.strip():
        raise _unreadable(f"the credential {path.name} is empty")
    if len(content) > wire.MAX_CREDENTIAL_BYTES:
        raise _unreadable(f"the credential {path.name} has more than {wire.MAX_CREDENTIAL_BYTES} bytes")
    return content


def _unreadable(text: str) -> TransferFailure:
    return TransferFailure(ErrorClass.CREDENTIAL_MISSING, text)


def _cannot(text: str) -> TransferFailure:
    return TransferFailure(ErrorClass.BAD_REQUEST, text)


def _plugin_data(items: Iterable[Item]) -> ClassAd:
    """Collect PluginData of all files. HTCondor takes it from the job's ad: it differs between methods only."""
    data = ClassAd()
    by_method: dict[str, ClassAd] = {}
    for item in items:
        if by_method.setdefault(item.method, item.given) != item.given:
            raise _cannot("the files of this call have different PluginData")
        data.update(item.given)
    if any(data.get("PluginData") != given.get("PluginData") for given in by_method.values()):
        raise _cannot("the files of this call have different PluginData")
    return data
