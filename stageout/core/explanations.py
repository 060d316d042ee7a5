"""The meaning of each error class for people: what happened and what to do. The reference and the page show it."""

from __future__ import annotations

from typing import NamedTuple

from stageout.core.errors import ErrorClass


class Explanation(NamedTuple):
    """Two sentences about output that could not be delivered. :param action: next step of the job's owner."""

    happened: str
    action: str


EXPLANATIONS: dict[ErrorClass, Explanation] = {
    ErrorClass.PLUGIN_BROKEN: Explanation(
        "The transfer plugin does not work on that node.",
        "Tell the node's administrator, then `stageout retry`.",
    ),
    ErrorClass.BAD_REQUEST: Explanation(
        "The plugin cannot do what the URL or an option asks for.",
        "Correct the URL or the option, then `condor_release`.",
    ),
    ErrorClass.BAD_URL: Explanation(
        "The URL is wrong.",
        "Correct the URL with `condor_qedit`, then `condor_release`.",
    ),
    ErrorClass.NOT_ATTEMPTED: Explanation(
        "The plugin was stopped before it reached this file.",
        "`stageout retry`.",
    ),
    ErrorClass.NAME_NOT_RESOLVED: Explanation(
        "No host has the name in the URL.",
        "Correct the URL and `condor_release`, or have the name repaired and `stageout retry`.",
    ),
    ErrorClass.NAME_LOOKUP_FAILED: Explanation(
        "The name server did not answer, in any attempt.",
        "`stageout retry` when the name server answers again.",
    ),
    ErrorClass.CONNECT_FAILED: Explanation(
        "No connection to the server was possible, in any attempt.",
        "`stageout retry` when the server is up.",
    ),
    ErrorClass.TLS_UNTRUSTED: Explanation(
        "The server's certificate is not trusted, or has expired.",
        "Tell the server's administrator, then `stageout retry`.",
    ),
    ErrorClass.CREDENTIAL_MISSING: Explanation(
        "The upload needs a credential, and the job has none.",
        "Provide it and `stageout retry`. If the URL names no credential service, correct the URL and "
        "`condor_release`.",
    ),
    ErrorClass.CREDENTIAL_REFUSED: Explanation(
        "The server refused the credential.",
        "Renew the credential, then `stageout retry`.",
    ),
    ErrorClass.CREDENTIAL_EXPIRED: Explanation(
        "The credential has expired.",
        "Renew the credential, then `stageout retry`.",
    ),
    ErrorClass.PERMISSION_DENIED: Explanation(
        "You may not write to that place.",
        "Ask for permission and `stageout retry`, or choose another URL and `condor_release`.",
    ),
    ErrorClass.NOT_FOUND: Explanation(
        "A directory in the URL does not exist.",
        "Create it and `stageout retry`, or choose another URL and `condor_release`.",
    ),
    ErrorClass.CONFLICT: Explanation(
        "The name is taken by a directory, or by a file that must not be replaced.",
        "Move it away and `stageout retry`, or choose another URL and `condor_release`.",
    ),
    ErrorClass.TOO_LARGE: Explanation(
        "The server does not accept files of that size.",
        "Choose another URL and `condor_release`.",
    ),
    ErrorClass.NOT_SUPPORTED: Explanation(
        "Plugin or server does not support what the URL asks for.",
        "Choose another URL and `condor_release`.",
    ),
    ErrorClass.LOCAL_FILE: Explanation(
        "An output file is missing on the node, or cannot be read.",
        "Check `transfer_output_files`, then `condor_release`.",
    ),
    ErrorClass.SOURCE_CHANGED: Explanation(
        "A file changed after the job had ended.",
        "Find the program that still writes to it, then `condor_release`.",
    ),
    ErrorClass.REQUEST_REJECTED: Explanation(
        "The server rejected the request.",
        "Correct the URL or the option, then `condor_release`.",
    ),
    ErrorClass.THROTTLED: Explanation(
        "The server asked for fewer requests, in every attempt.",
        "`stageout retry` later.",
    ),
    ErrorClass.SERVER_BUSY: Explanation(
        "The server was busy, in every attempt.",
        "`stageout retry` later.",
    ),
    ErrorClass.SERVER_ERROR: Explanation(
        "The server reported a failure of its own, in every attempt.",
        "`stageout retry` later; tell the server's administrator if it continues.",
    ),
    ErrorClass.STALLED: Explanation(
        "The transfer made no progress, in every attempt.",
        "`stageout retry`; tell the administrators if it continues.",
    ),
    ErrorClass.TIMED_OUT: Explanation(
        "The transfer took too long, in every attempt.",
        "`stageout retry`; tell the administrators if it continues.",
    ),
    ErrorClass.CONNECTION_LOST: Explanation(
        "The connection broke, in every attempt.",
        "`stageout retry`; tell the administrators if it continues.",
    ),
    ErrorClass.SIZE_MISMATCH: Explanation(
        "The file at the destination has another size than the file that was sent.",
        "Tell the server's administrator, then `stageout retry`.",
    ),
    ErrorClass.CONTENT_MISMATCH: Explanation(
        "The file at the destination has another digest than the file that was sent.",
        "Tell the server's administrator, then `stageout retry`.",
    ),
    ErrorClass.NOT_VERIFIED: Explanation(
        "The server does not confirm what it stored, and the pool requires that.",
        "Choose another URL and `condor_release`. The pool's administrator knows which servers confirm.",
    ),
    ErrorClass.NO_SPACE_LOCAL: Explanation(
        "The node has no space.",
        "Tell the node's administrator, then `stageout retry`.",
    ),
    ErrorClass.NO_SPACE_REMOTE: Explanation(
        "The destination has no space.",
        "Make space there, then `stageout retry`.",
    ),
    ErrorClass.QUOTA_EXCEEDED: Explanation(
        "Your quota at the destination is used up.",
        "Delete files or ask for more quota, then `stageout retry`.",
    ),
    ErrorClass.DEADLINE: Explanation(
        "The transfer did not finish within the time that a plugin has.",
        "`stageout retry`; use smaller files if it continues.",
    ),
    ErrorClass.UNKNOWN: Explanation(
        "Another failure, which the hold reason describes. Also: output that was lost in several runs "
        "(`STAGEOUT_MAX_RERUNS`).",
        "Follow the hold reason.",
    ),
}
