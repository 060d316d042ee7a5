"""Cases from jobs: names, directories, large files, retries, TLS, proxies and variables."""

from __future__ import annotations

import datetime
import gzip
from collections.abc import Callable, Sequence
from typing import Any

import trustme

from tests.curl.beside import Ask, Case, Stage
from tests.curl.interposer import Asked, Reply, changed, status

DATA = bytes(range(256)) * 40
_LARGE = bytes(range(256)) * (8 << 12)
_NAMES = ("c#1", "what?", "50%41", "two words", "käse")
_JOB = "submit.example.org#12.0#1700000000"
_BELOW = f"{_JOB.replace('#', '_')}/0003"
#: HTCondor's own turns ``dav`` into ``http`` in its report.
_DAV = frozenset({"TransferProtocol"})
#: HTCondor's own shows the password.
_PASSWORD = frozenset({"DeveloperData.TransferHostName"})


def _stored(stage: Stage, path: str) -> Callable[[], bytes | None]:
    """Read what the store has at a path."""
    return lambda: stage.store.files.get(path)


def _put_names(stage: Stage, base: str, below: str, job: dict[str, str], written: Sequence[str] = _NAMES) -> Ask:
    """Upload a file of each name. :param written: the name in the URL."""
    return Ask(
        [
            stage.offered(f"{base}/{text}", name.encode(), _stored(stage, f"{below}/{name}"), name)
            for name, text in zip(_NAMES, written)
        ],
        upload=True,
        job=job,
    )


def _put_output_names(stage: Stage) -> Ask:
    """HTCondor puts raw names behind ``output_destination``."""
    base = stage.store.url("run")
    return _put_names(stage, base, "run", {"OutputDestination": base})


def _put_remap_names(stage: Stage) -> Ask:
    """A person writes URLs into ``transfer_output_remaps``."""
    written = ("c%231", "what%3F", "50%2541", "two%20words", "k%C3%A4se")
    return _put_names(stage, stage.store.url("run"), "run", {}, written)


def _checkpoint_job(stage: Stage) -> dict[str, str]:
    base = stage.store.url("run")
    return {"OutputDestination": base, "CheckpointDestination": f"{base}/checkpoints", "GlobalJobId": _JOB}


def _put_checkpoint_names(stage: Stage) -> Ask:
    """A checkpoint below the output."""
    job = _checkpoint_job(stage)
    return _put_names(stage, f"{job['CheckpointDestination']}/{_BELOW}", f"run/checkpoints/{_BELOW}", job)


def _get_checkpoint_names(stage: Stage) -> Ask:
    """HTCondor asks for raw names when the job starts again."""
    job = _checkpoint_job(stage)
    stage.store.files.update({f"run/checkpoints/{_BELOW}/{name}": name.encode() for name in _NAMES})
    base = f"{job['CheckpointDestination']}/{_BELOW}"
    # HTCondor itself ends a local name at the question mark
    wanted = [(name, f"file{number}") for number, name in enumerate(_NAMES)]
    return Ask([stage.wanted(f"{base}/{name}", name.encode(), local) for name, local in wanted], job=job)


def _put_many(stage: Stage) -> Ask:
    store, names = stage.store, [f"file{number}" for number in range(20)]
    return Ask(
        [stage.offered(store.url(name), DATA, _stored(stage, name), name) for name in names],
        upload=True,
    )


def _get_many(stage: Stage) -> Ask:
    names = [f"file{number}" for number in range(300)]
    stage.store.files.update(dict.fromkeys(names, DATA))
    return Ask([stage.wanted(stage.store.url(name), DATA, name) for name in names])


def _put_one_refused(stage: Stage) -> Ask:
    """Two files fail in a way that passes, one is fine, one decides the outcome."""
    store, words = stage.store, {"broken1": 500, "broken2": 503, "refused": 403}

    def answer(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        code = words.get(asked.path.lstrip("/"))
        return Reply(code) if code else forward()

    store.always("PUT", answer)
    names = ("broken1", "broken2", "good", "refused")
    return Ask(
        [stage.offered(store.url(name), DATA, _stored(stage, name), name) for name in names],
        upload=True,
    )


def _put(data: bytes, *faults: object, method: str = "PUT", policy: str = "") -> Callable[[Stage], Ask]:
    """Upload; all requests of a method get a fault."""

    def arrange(stage: Stage) -> Ask:
        for fault in faults:
            stage.store.always(method, fault)
        job = {"PluginData": {"checksum_policy": policy}} if policy else {}
        return stage.put_to_store(data, job=job)

    return arrange


def _get(data: bytes, *faults: object, **more: Any) -> Callable[[Stage], Ask]:
    """Download; the first requests get faults."""

    def arrange(stage: Stage) -> Ask:
        stage.store.next("GET", *faults)
        return stage.get_from_store(data, **more)

    return arrange


def _put_redirected(code: int, stored: bool = False) -> Callable[[Stage], Ask]:
    """The first PUT is redirected to the same name.

    :param stored: the server has taken the file before.
    """

    def redirect(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        if stored:
            forward()
        return Reply(code, {"Location": "/file?again"})

    def arrange(stage: Stage) -> Ask:
        stage.store.next("PUT", redirect)
        return stage.put_to_store(DATA)

    return arrange


def _get_always(fault: object) -> Callable[[Stage], Ask]:
    def arrange(stage: Stage) -> Ask:
        stage.store.always("GET", fault)
        return stage.get_from_store(DATA)

    return arrange


def _get_signed(stage: Stage) -> Ask:
    url = stage.get_from_store(DATA).files[0].url
    return stage.get(f"{url}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=abcdef", DATA)


def _get_refused(user: str = "", service: str = "") -> Callable[[Stage], Ask]:
    """401 for a password or a token."""

    def arrange(stage: Stage) -> Ask:
        stage.store.always("GET", status(401, "no"))
        url = stage.get_from_store(DATA).files[0].url
        url = url.replace("http://", f"http://{user}@" if user else f"{service}+http://")
        return stage.get(url, DATA, tokens={service: "abc.def.ghi"} if service else {})

    return arrange


def _new_directory(scheme: str, count: int) -> Callable[[Stage], Ask]:
    """Several files into a directory that Apache does not have yet."""

    def arrange(stage: Stage) -> Ask:
        server = stage.apache()
        base, root = f"{scheme}://127.0.0.1:{server.port}/run/7", server.root / "run" / "7"

        def arrived(name: str) -> Callable[[], bytes | None]:
            return lambda: (root / name).read_bytes() if (root / name).exists() else None

        names = [f"file{number}" for number in range(count)]
        files = [stage.offered(f"{base}/{name}", DATA, arrived(name), name) for name in names]
        return Ask(files, upload=True, job={"OutputDestination": base})

    return arrange


def _ftp(path: str, user: str = "", made: str = "") -> Callable[[Stage], Ask]:
    """Upload by FTP. :param made: a directory that the server has."""

    def arrange(stage: Stage) -> Ask:
        url, folder = stage.ftp()
        (folder / made).mkdir(exist_ok=True)
        url = url.replace("ftp://", f"ftp://{user}@") if user else url
        place = folder / path
        return stage.put(f"{url}/{path}", DATA, lambda: place.read_bytes() if place.exists() else None)

    return arrange


def _distrust(name: str = "127.0.0.1", old: bool = False) -> Callable[[Stage], Ask]:
    """A known authority, and a certificate for another name, or of another time."""

    def arrange(stage: Stage) -> Ask:
        authority, bundle = trustme.CA(), stage.folder("authorities") / "ca.pem"
        authority.cert_pem.write_to_path(bundle)
        now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
        valid = (now - 2 * day, now - day) if old else None
        server = stage.webdav(stage.certificate(name, authority=authority, valid=valid))
        return stage.get(f"https://127.0.0.1:{server.port}/file", DATA, env={"SSL_CERT_FILE": str(bundle)})

    return arrange


def _put_through_proxy(stage: Stage) -> Ask:
    door = stage.proxy(stage.store)
    return stage.put_to_store(DATA, env={"http_proxy": f"http://127.0.0.1:{door.port}"})


def _into_missing_folder(stage: Stage) -> Ask:
    return stage.get_from_store(DATA, name="no/such/file")


JOBS = [
    Case("put-output-names", _put_output_names),
    Case("put-remap-names", _put_remap_names),
    Case("put-checkpoint-names", _put_checkpoint_names),
    Case("get-checkpoint-names", _get_checkpoint_names),
    Case("put-20-files", _put_many),
    Case("get-300-files", _get_many, slow=True),
    Case("put-one-of-four-refused", _put_one_refused, failure_slack_s=10),
    Case("put-empty", _put(b"")),
    Case("put-large", _put(_LARGE)),
    Case("get-large", _get(_LARGE)),
    *(
        Case(f"put-large-{code}", _put(_LARGE, status(code, "no")), failure_slack_s=5)
        for code in (423, 429, 500, 503, 507)
    ),
    Case("put-head-404-policy-off", _put(DATA, status(404), method="HEAD", policy="off")),
    Case("get-503-retry-after-1", _get(DATA, status(503, Retry_After="1"))),
    Case("get-503-retry-after-300", _get_always(status(503, Retry_After="300")), failure_slack_s=5),
    Case("put-503-retry-after-300", _put(DATA, status(503, Retry_After="300")), failure_slack_s=5),
    *(Case(f"put-redirect-{code}", _put_redirected(code)) for code in (301, 302, 303, 308)),
    Case("put-stored-and-303", _put_redirected(303, stored=True)),
    Case("get-redirect-to-a-file", _get_always(status(302, Location="file:///etc/hostname"))),
    Case(
        "get-5-redirects-3-allowed", _get(DATA, *[status(302, Location="/file")] * 5, job_env={"CURL_MAX_REDIRS": "3"})
    ),
    Case("get-signed-url", _get_signed),
    Case("get-password-refused", _get_refused(user="user:pass-word"), other=_PASSWORD),
    Case("get-token-refused", _get_refused(service="service")),
    Case("get-compressed-file", _get(gzip.compress(DATA), changed(Content_Encoding="gzip"))),
    Case("get-into-missing-directory", _into_missing_folder),
    Case("put-dav-new-directory", _new_directory("dav", 6), other=_DAV),
    Case("put-http-new-directory", _new_directory("http", 1)),
    Case("put-ftp-new-directory", _ftp("new/deep/file")),
    Case("put-ftp-refused", _ftp("never/file", made="never")),
    Case("put-ftp-password-refused", _ftp("file", user="alice:wrong"), other=_PASSWORD),
    Case("https-other-name", _distrust("other.example.org")),
    Case("https-expired", _distrust(old=True)),
    Case("put-proxy", _put_through_proxy),
    Case(
        "proxy-down",
        _get(DATA, env={"http_proxy": "http://127.0.0.1:1"}, job_env={"CURL_MAX_RETRY_ATTEMPTS": "1"}),
        failure_slack_s=4,
    ),
]
