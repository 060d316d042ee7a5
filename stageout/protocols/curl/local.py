"""file: copies to and from a mounted filesystem, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request
from stageout.protocols.curl import digests
from stageout.protocols.curl.digests import Digester
from stageout.protocols.curl.exchange import local_failure
from stageout.protocols.curl.files import READ_BYTES, PartFile, SourceFile
from stageout.protocols.curl.web import target_of


def _path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise TransferFailure(ErrorClass.BAD_URL, f"file://{parts.netloc}: write file:///absolute/path")
    return unquote(parts.path, errors="surrogateescape")


def download(request: Request, context: Context) -> Outcome:
    """Copy from the URL's path into the sandbox."""
    source = _path(target_of(request, context, upload=False).url)
    if not Path(source).is_file():
        raise TransferFailure(ErrorClass.NOT_FOUND, f"{source} is not a file on this execute point")
    return _copy(source, request.local_path, request, context)


def upload(request: Request, context: Context) -> Outcome:
    """Copy from the sandbox to the URL's path; missing directories are made."""
    target = _path(target_of(request, context, upload=True).url)
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        kind = ErrorClass.PERMISSION_DENIED if isinstance(problem, PermissionError) else ErrorClass.CONFLICT
        raise TransferFailure(kind, f"cannot make {Path(target).parent}: {problem.strerror}") from None
    return _copy(request.local_path, target, request, context)


def _copy(source_path: str, target_path: str, request: Request, context: Context) -> Outcome:
    policy, owner = digests.policy_of(request, context), digests.wanted_by_owner(request)
    names = digests.chosen(policy, owner)
    with SourceFile(source_path, names) as source, PartFile(target_path) as part:
        try:
            while chunk := source.read(READ_BYTES):
                part.write(chunk)
                context.progress(part.size_bytes)
        except OSError as problem:
            raise local_failure(problem) from None
        source.check_unchanged()
        if part.size_bytes != source.size_bytes:
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, f"copied {part.size_bytes} of {source.size_bytes} bytes")
        digests.compare(source.complete_digests(), owner, "checksum in PluginData")
        part.finish()
        verified = _read_back(target_path, source.digests, names, context)
        return Outcome(source.size_bytes, source.size_bytes, 0.0, verified, dict(source.digests))


def _read_back(path: str, ours: dict[str, str], names: tuple[str, ...], context: Context) -> str:
    """What the file says that was written: its digest (read again), or its size when digests are off."""
    if Path(path).stat().st_size == 0 or not names:
        return "size"
    digester = Digester(names)
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(READ_BYTES):
            digester.update(chunk)
            context.progress(0)
    return digests.compare(digester.values(), ours, "what was written") or "size"
