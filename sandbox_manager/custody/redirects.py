"""Redirects: other URLs for the files of a sandbox that wait or have failed, in the transaction of the order.

Files that are delivered, that are being sent, or that a custodian may have keep their URL, so that no file is
sent to two places. The credentials in custody belong to the old server: a URL of another server can be used only if it
names them, or if the files are sent without any. The fallback of a job (``custody/fallbacks.py``) uses the same rules.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.queries import DamagedText
from stageout.core.states import AWAY_FILES, STILL_FILES
from stageout.core.synchronous import NO_REASON, Reason
from stageout.model.file import StoredFile
from stageout.model.sandbox import Destination
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.schemes import comparable_url, credential_of, method_of, shown_url, split_url
from stageout.wire.owner_requests import redirect_problem

_NAMED = 5


class PluginChoice(NamedTuple):
    """The plugin for a scheme. :param path: "" for none. :param problem: reason why it cannot be used."""

    path: str
    problem: Reason = NO_REASON


#: From the plugin of the hand-off and a scheme to the plugin of that scheme.
FindPlugin = Callable[[str, str], PluginChoice]


class Redirected(NamedTuple):
    """The result of a redirect. :param files: with another URL now. :param refused: reason for all others."""

    files: int
    refused: str = ""


class NotRedirected(Exception):
    """Nothing is redirected; the text is the reason."""


def choose_plugin(table: PluginsTable, require_verified: bool, path: str, scheme: str) -> PluginChoice:
    """Return the plugin for URLs of a scheme, and why it cannot be used. :param path: the starter's choice."""
    plugin = table.find(path, scheme)
    if plugin is None:
        return PluginChoice("", Reason("Plugin", f"no plugin of this node moves {method_of(scheme)} URLs"))
    problem = NO_REASON
    if require_verified and not plugin.verifies:
        text = f"{plugin.path} does not verify uploads, and STAGEOUT_REQUIRE_VERIFIED is true"
        problem = Reason("NotVerified", text)
    return PluginChoice(str(plugin.path), problem)


def no_plugin(path: str, scheme: str) -> PluginChoice:
    """Find no plugin."""
    return PluginChoice("", Reason("Plugin", "this node has no plugins"))


def redirect(db: sqlite3.Connection, sandbox: int, url: str, name: str, find_plugin: FindPlugin) -> Redirected:
    """Give files of a sandbox another URL.

    :param url: of the file ``name``; without a name, or with a slash at its end, the directory of all.
    """
    try:
        problem = redirect_problem(url)
        if problem:
            raise NotRedirected(problem)
        wanted = {item: _new_url(item, url, name) for item in _chosen(db, sandbox, url, name)}
        # The agent repeats an order that it has lost: files that have their new URL stay as they are.
        changed = {item: new for item, new in wanted.items() if item.url != new}
        moved = {item: new for item, new in changed.items() if _is_movable(item)}
        targets = _checked_targets(db, sandbox, moved, url, find_plugin)
    except NotRedirected as refused:
        return Redirected(0, str(refused))
    for item, new in moved.items():
        updates.set_url(db, item, new, targets[item])
    return Redirected(len(moved), _left([item for item in changed if item not in moved]))


def fall_back(db: sqlite3.Connection, sandbox: int, url: str, find_plugin: FindPlugin) -> int:
    """Give each undelivered file a URL below the fallback, unless it has fallen back before. Returns how many files.

    :raises NotRedirected: not all of these files can be sent there, so none is.
    """
    waiting = filter(_is_movable, queries.left_first_time(db, sandbox))
    wanted = {item: _new_url(item, url, "") for item in waiting}
    moved = {item: new for item, new in wanted.items() if comparable_url(item.url) != comparable_url(new)}
    targets = _checked_targets(db, sandbox, moved, url, find_plugin)
    for item, new in moved.items():
        updates.set_url(db, item, new, targets[item], fell_back=True)
    return len(moved)


def _chosen(db: sqlite3.Connection, sandbox: int, url: str, name: str) -> list[StoredFile]:
    """Return the files that the owner means and that are still here; none if a redirect was carried out before.

    :raises NotRedirected: there is none.
    """
    known = list(queries.all_files(db, sandbox))
    if name:
        known = [_named(known, name)]
    here = [item for item in known if item.state not in AWAY_FILES]
    if not here and not any(item.url in (url, _in_directory(url, item)) for item in known):
        raise NotRedirected(
            f"{name} is delivered, or in custody of a router" if name else "no file waits or has failed"
        )
    return here


def _named(files: Sequence[StoredFile], name: str) -> StoredFile:
    """Return the file with this name, or the only one whose URL ends with it.

    :raises NotRedirected: there is none, or several.
    """
    found = [item for item in files if item.name == name] or [item for item in files if _last_part(item.url) == name]
    if not found:
        raise NotRedirected(f"{name} is not a file of this run's output")
    if len(found) > 1:
        raise NotRedirected(f"{name} is the name of {len(found)} files; use the names that 'stageout status' shows")
    return found[0]


def _is_movable(item: StoredFile) -> bool:
    # A file with a receipt may be at a custodian that delivers it to the old URL. A damaged URL has lost its last part.
    is_here = item.state in STILL_FILES and not item.digest
    return is_here and not isinstance(item.url, DamagedText)


def _left(files: Sequence[StoredFile]) -> str:
    """Return the reason why these files keep their URL."""
    if not files:
        return ""
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    names = ", ".join(item.name for item in files[:_NAMED])
    return f"{names}{more}: being sent now, or handed to a router; ask again when it waits"


def _last_part(url: str) -> str:
    return shown_url(url).rpartition("/")[2]


def _new_url(item: StoredFile, url: str, name: str) -> str:
    """Return the file's URL: with a directory, the last part of the old URL stays."""
    if name and not url.endswith("/"):
        return url
    if _last_part(item.url) in ("", ".", ".."):
        raise NotRedirected(f"the URL of {item.name} has no file name; name the file and its whole URL")
    return _in_directory(url, item)


def directory(url: str) -> str:
    """Return the beginning of the URLs of files that go to a directory."""
    return f"{url.rstrip('/')}/"


def _in_directory(url: str, item: StoredFile) -> str:
    return directory(url) + _last_part(item.url)


def _checked_targets(
    db: sqlite3.Connection, sandbox: int, moved: Mapping[StoredFile, str], url: str, find_plugin: FindPlugin
) -> dict[StoredFile, Destination]:
    """Return the destinations of new URLs. :raises NotRedirected: one of them cannot be used."""
    _check_distinct(db, sandbox, moved)
    return _targets(db, moved, url, find_plugin)


def _check_distinct(db: sqlite3.Connection, sandbox: int, moved: Mapping[StoredFile, str]) -> None:
    """Compare with all other files too. :raises NotRedirected: two files would have one URL."""
    places = {(item.ticket_id, item.position) for item in moved}
    others = (item for item in queries.all_files(db, sandbox) if (item.ticket_id, item.position) not in places)
    taken = {comparable_url(item.url) for item in others}
    for new in moved.values():
        if comparable_url(new) in taken:
            raise NotRedirected(f"two files would get the URL {new}; redirect each by its name")
        taken.add(comparable_url(new))


def _targets(
    db: sqlite3.Connection, moved: Iterable[StoredFile], url: str, find_plugin: FindPlugin
) -> dict[StoredFile, Destination]:
    """Return the new destinations.

    :raises NotRedirected: no plugin may send a file there, or not with the credentials in custody.
    """
    known = queries.destinations(db)
    found: dict[tuple[int, int], Destination] = {}  # by ticket and old destination
    for item in moved:
        key = (item.ticket_id, item.destination)
        if key not in found:
            stored = queries.stored_credentials(db, item.ticket)
            found[key] = target_for(item, known[item.destination], stored, url, find_plugin)
    return {item: found[item.ticket_id, item.destination] for item in moved}


def target_for(
    item: StoredFile, old: Destination, stored: StoredCredentials, url: str, find_plugin: FindPlugin
) -> Destination:
    """Return the destination of a file at another URL. :param stored: credentials of its ticket.

    :raises NotRedirected: no plugin may send it there, or not with these credentials.
    """
    place, token = split_url(url), credential_of(url)
    is_same = place == (old.scheme, old.host) and token == credential_of(item.url)
    if not is_same or not place[1]:  # without a host the path names the server
        _check_credentials(item, stored, token)
    plugin = find_plugin(old.plugin, place[0])
    if plugin.problem:
        raise NotRedirected(str(plugin.problem))
    return Destination(plugin.path, *place, old.credentials_digest)


def _check_credentials(item: StoredFile, stored: StoredCredentials, named: str) -> None:
    """Check that a file may go to another server with its ticket's credentials. :param named: token in the new URL.

    A proxy is not bound to a server.
    """
    held = {one.service for one in stored.credentials if one.kind == "token"}
    if named and named not in held:
        raise NotRedirected(f"no credential {named} came with this job, so no {named}+ URL can be used")
    if stored.plugin_data or held - {named}:
        what = ", ".join(sorted(held - {named})) or "PluginData"
        raise NotRedirected(f"{item.name} is sent with {what}, which goes to another server only if the URL names it")
