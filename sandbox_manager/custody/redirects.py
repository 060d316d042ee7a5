"""Other destinations for the files of a sandbox: redirects by their owner, and the fallback that their job names.

A redirect gives files that wait or have failed another URL, in the transaction of the order. Files that are delivered,
that are being sent, or that a custodian may have keep their URL, so that no file is sent to two destinations. The
credentials in custody belong to the old server. A URL of another server can be used only if it names them, or if the
files are sent without any.

A fallback (StageOutFallback) is the second destination of a job. The manager redirects the undelivered files of a
sandbox there when the sandbox would fail, or has been tried for STAGEOUT_FALLBACK_AFTER. The last failure of one of its
files must be the destination's: a fault of the node sends nothing there. This happens in the transaction that would
otherwise record the failure. The row of each file has the fact, so no crash, retry or redirect sends it there a second
time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.queries import DamagedText
from stageout.core import log
from stageout.core.states import AWAY_FILES, STILL_FILES
from stageout.core.synchronous import NO_REASON, Reason
from stageout.core.units import count
from stageout.model.file import StoredFile
from stageout.model.sandbox import Destination, Sandbox, destination_of
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.schemes import comparable_url, credential_of, fallback_problem, method_of, shown_url, split_url
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
        targets = _checked_targets(db, sandbox, moved, url, find_plugin=find_plugin)
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
    targets = _checked_targets(db, sandbox, moved, url, find_plugin=find_plugin)
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
    is_here = item.state in STILL_FILES and not item.proof
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
            found[key] = target_for(item, old=known[item.destination], stored=stored, url=url, find_plugin=find_plugin)
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


#: Reports repeat the reasons of all sandboxes.
_REASON_CHARS = 300


class FallbackRules(NamedTuple):
    """The rules of the node.

    :param find_plugin: for the scheme of a fallback. :param after_s: see :class:`sandbox_manager.rules.RetryRules`.
    :param reason_away: returns why the server of a destination cannot be reached, "" where it can.
    """

    find_plugin: FindPlugin
    after_s: float
    reason_away: Callable[[int], str]


def problem_of(
    url: str, plugin: str, files: Iterable[StoredFile], held: StoredCredentials | None, find_plugin: FindPlugin
) -> str:
    """Return why the files of a hand-off cannot be sent to this fallback; "" when they can.

    :param plugin: of the hand-off. :param held: its credentials, None without any.
    """
    problem = fallback_problem(url)
    if problem:
        return problem
    stored = held or StoredCredentials("", "", "", ())
    try:
        for old, item in {destination_of(plugin, item.url, stored.digest): item for item in files}.items():
            target_for(item, old, stored, url, find_plugin=find_plugin)
    except NotRedirected as refused:
        return str(refused)[:_REASON_CHARS]
    return ""


def use_if_due(db: sqlite3.Connection, sandbox: Sandbox, rules: FallbackRules, now: int) -> bool:
    """Send undelivered files to the fallback if their time has come. Return whether the sandbox has changed."""
    if not sandbox.fallback or not (_has_failed(sandbox) or _has_waited(sandbox, rules.after_s, now)):
        return False
    why = destination_failure(db, sandbox, rules.reason_away)
    if not why:
        return False
    use(db, sandbox, why, rules.find_plugin, now=now)
    found = queries.sandbox(db, sandbox.id)
    return found is not None and found.change != sandbox.change


def use(db: sqlite3.Connection, sandbox: Sandbox, why: str, find_plugin: FindPlugin, now: int) -> bool:
    """Send undelivered files to the fallback with fresh attempts. Return whether any go there.

    :param why: the failure of the first destination.
    """
    if not sandbox.fallback:
        return False
    try:
        files = fall_back(db, sandbox.id, sandbox.fallback, find_plugin)
    except NotRedirected as refused:
        if not sandbox.fallback_note:
            problem = str(refused)[:_REASON_CHARS]
            updates.ignore_fallback(db, sandbox.id, problem)
            log.warn("fallback-ignored", job=sandbox.run.job, run=sandbox.run.number, problem=problem)
        return False
    if files:
        reason = sandbox.fallback_note or why[:_REASON_CHARS]
        updates.keep_fallback_reason(db, sandbox.id, reason)
        updates.fresh_attempts(db, sandbox.id, now)
        updates.set_reason(db, sandbox.id, _present(sandbox.fallback, reason))
        log.event(
            "fallback-used", job=sandbox.run.job, run=sandbox.run.number, files=files, to=sandbox.fallback, reason=why
        )
    return bool(files)


def _has_failed(sandbox: Sandbox) -> bool:
    return bool(sandbox.failed) and not sandbox.waiting and not sandbox.moving


def _has_waited(sandbox: Sandbox, after_s: float, now: int) -> bool:
    return bool(sandbox.waiting or sandbox.failed) and not sandbox.paused and 0 < after_s <= now - sandbox.due_since


def destination_failure(db: sqlite3.Connection, sandbox: Sandbox, reason_away: Callable[[int], str]) -> str:
    """Return the failure of the first destination; "" while nothing was tried there, or only the node failed."""
    worst = queries.first_error(db, sandbox.id, of_destination=True)
    if worst is not None:
        return worst.error or "an attempt failed"
    return next(filter(None, (reason_away(part.destination) for part in sandbox.waiting)), "")


# ---- texts for the owner ---------------------------------------------------------------------------------------------


def _present(url: str, reason: str) -> str:
    return f"goes to the fallback {url} because the destination failed: {reason}"


def present_reason(sandbox: Sandbox) -> str:
    """Return the reason of a sandbox that has not failed since it went to its fallback; "" for others."""
    return _present(sandbox.fallback, sandbox.fallback_note) if sandbox.fallback and sandbox.fallback_note else ""


def delivery_reason(db: sqlite3.Connection, sandbox: Sandbox) -> str:
    """Return which part of a delivered sandbox is at the fallback, and why; "" when nothing is."""
    files = queries.count_below(db, sandbox.id, directory(sandbox.fallback)) if present_reason(sandbox) else 0
    if not files:
        return ""
    return f"{count(files, 'file')} delivered to the fallback {sandbox.fallback} because the destination failed: " + (
        sandbox.fallback_note
    )


def failure_reason(sandbox: Sandbox, worst: StoredFile | None, reason: str) -> str:
    """Return the reason of a failed sandbox, with what became of its fallback.

    :param worst: the file whose failure counts. :param reason: that failure.
    """
    if not sandbox.fallback:
        return f"{reason}; the fallback was not used: {sandbox.fallback_note}" if sandbox.fallback_note else reason
    is_there = worst is not None and worst.fell_back and worst.url.startswith(directory(sandbox.fallback))
    if not is_there:
        return reason
    if worst is not None and worst.of_node:
        return f"{reason}; the destination had failed before: {sandbox.fallback_note}"
    both = f"Destination: {sandbox.fallback_note}. Fallback {sandbox.fallback}: {reason}"
    return f"the destination and the fallback failed. {both}"
