"""HTTPS server for renewed credentials. Off unless STAGEOUT_CREDENTIAL_PORT is set."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from stageout.core import durable, log
from stageout.core.config import ConfigError, Settings
from stageout.core.listening import in_url
from stageout.wire.renewal import MAX_REQUEST_BYTES, PATH, Answer, BadRenewal, Request, answer_bytes, read_request

if TYPE_CHECKING:
    from aiohttp import web

CERTIFICATE_FILE = "stageout_agent_tls"
_LIFETIME_DAYS = 3650
_HANDLE_S = 60.0
Respond = Callable[[Request], Awaitable["list[Answer]"]]


class Certificate:
    """The server's self-signed certificate with its key, made at the first start. Managers know its digest.

    :param path: PEM file. :raises ConfigError: it cannot be read, made or stored.
    """

    def __init__(self, path: Path) -> None:
        try:
            if not path.exists():
                durable.write_file("agent-certificate", path, _new_certificate(), 0o600)
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.minimum_version = ssl.TLSVersion.TLSv1_2
            self.context.load_cert_chain(path)
            self.digest = sha256(ssl.PEM_cert_to_DER_cert(_certificate_in(path.read_text()))).hexdigest()
        except (OSError, ssl.SSLError, ValueError, ImportError) as problem:
            raise ConfigError(
                f"the certificate {path} cannot be used ({problem}); remove it and a new one is made, or set "
                "STAGEOUT_CREDENTIAL_PORT = 0"
            ) from None


def _certificate_in(text: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return text[text.index(begin) : text.index(end) + len(end)] + "\n"


def _new_certificate() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stageout schedd agent")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
    signed = made.not_valid_after(now + datetime.timedelta(days=_LIFETIME_DAYS)).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + signed.public_bytes(serialization.Encoding.PEM)


def addresses_of(settings: Settings) -> tuple[str, str]:
    """Return the address that nodes connect to, and the one to listen on ("" for all).

    Nodes connect to STAGEOUT_CREDENTIAL_HOST, else to the address in NETWORK_INTERFACE, else to the full host name.
    """
    try:
        own = str(ipaddress.ip_address(settings.condor("NETWORK_INTERFACE")))
    except ValueError:
        own = ""
    host = settings.text("STAGEOUT_CREDENTIAL_HOST") or own or settings.condor("FULL_HOSTNAME", "localhost")
    return in_url(host), own


class CredentialServer:
    """HTTPS server. :param host: address to listen on, "" for all. :param respond: answers a request."""

    def __init__(self, host: str, port: int, certificate: Certificate, respond: Respond) -> None:
        self._host = host or None
        self._port = port
        self._certificate = certificate
        self._respond = respond
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Start to listen. :raises ConfigError: the port cannot be used, or aiohttp is missing."""
        try:
            from aiohttp import web
        except ImportError:
            raise ConfigError(
                "STAGEOUT_CREDENTIAL_PORT needs the Python package aiohttp: install it, or set the port to 0"
            ) from None
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post(PATH, self._handle)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, ssl_context=self._certificate.context).start()
        except OSError as problem:
            await self.close()
            raise ConfigError(f"STAGEOUT_CREDENTIAL_PORT = {self._port}: {problem}; choose a free port") from None
        log.event("credential-port-opened", port=self._port, certificate=self._certificate.digest)

    async def close(self) -> None:
        """Stop to listen."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request_received: web.Request) -> web.Response:
        from aiohttp import web

        try:
            request = read_request(await request_received.read())
            answers = await asyncio.wait_for(self._respond(request), _HANDLE_S)
        except BadRenewal as problem:
            log.warn("credential-request-failed", peer=request_received.remote, problem=problem)
            return web.Response(status=400, text=str(problem))
        except Exception as problem:
            log.error("credential-request-failed", peer=request_received.remote, problem=repr(problem))
            return web.Response(status=503, text="the agent cannot answer now")
        return web.Response(body=answer_bytes(answers), content_type="application/json")
