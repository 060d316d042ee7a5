"""A certificate authority for GSI, a server certificate and proxies of a user; nothing below /etc is touched."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

FULL = "1.3.6.1.5.5.7.21.1"
LIMITED = "1.3.6.1.4.1.3536.1.1.1.9"


def _name(*common: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Grid")]
    return x509.Name([*parts, *(x509.NameAttribute(NameOID.COMMON_NAME, word) for word in common)])


def _oid(text: str) -> bytes:
    numbers = [int(word) for word in text.split(".")]
    out = bytes([40 * numbers[0] + numbers[1]])
    for number in numbers[2:]:
        digits = [number & 0x7F]
        while number := number >> 7:
            digits.append(0x80 | number & 0x7F)
        out += bytes(reversed(digits))
    return bytes([6, len(out)]) + out


def _proxy_info(policy: str) -> bytes:
    inner = _oid(policy)
    inner = bytes([0x30, len(inner)]) + inner
    return bytes([0x30, len(inner)]) + inner


class Authority:
    """Makes everything below one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.trust = home / "certificates"
        self.trust.mkdir(parents=True)
        home.chmod(0o755)  # the server reads it as the user whom it serves
        self._key = _key()
        self._certificate = self._sign(_name("Test CA"), self._key, None, self._key, ca=True)
        self._user_key = _key()
        self._user = self._sign(_name("Alice"), self._user_key, self._certificate, self._key)
        self._trust()

    def _trust(self) -> None:
        pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        (self.home / "ca.pem").write_bytes(pem)
        policy = (
            "access_id_CA X509 '/O=Grid/CN=Test CA'\npos_rights globus CA:sign\ncond_subjects globus '\"/O=Grid/*\"'\n"
        )
        for option in ("-subject_hash", "-subject_hash_old"):
            command = ["openssl", "x509", "-noout", option, "-in", str(self.home / "ca.pem")]
            name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            (self.trust / f"{name}.0").write_bytes(pem)
            (self.trust / f"{name}.signing_policy").write_text(policy)

    def _sign(self, subject, key, issuer, signer, ca=False, policy="", ends_h=24.0, host=""):  # type: ignore[no-untyped-def]
        now = datetime.datetime.now(datetime.timezone.utc)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.subject if issuer is not None else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=48))
            .not_valid_after(now + datetime.timedelta(hours=ends_h))
        )
        if ca:
            made = made.add_extension(x509.BasicConstraints(True, None), True)
        if host:
            made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), False)
        if policy:
            info = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.5.5.7.1.14"), _proxy_info(policy))
            made = made.add_extension(info, True)
            usage = x509.KeyUsage(True, False, True, False, False, False, False, False, False)
            made = made.add_extension(usage, True)
        return made.sign(signer, hashes.SHA256())

    def proxy(self, policy: str = FULL, ends_h: float = 12.0) -> Path:
        """A proxy of the user in a file of its own, as X509_USER_PROXY wants it."""
        key = _key()
        serial = str(x509.random_serial_number() % 10**9)
        proxy = self._sign(_name("Alice", serial), key, self._user, self._user_key, policy=policy, ends_h=ends_h)
        path = self.home / f"proxy-{serial}"
        path.touch(0o600)
        path.write_bytes(_pem(proxy) + _private(key) + _pem(self._user))
        return path

    def server(self) -> dict[str, str]:
        """Environment of a server on this host that maps the user to whom runs it."""
        key = _key()
        certificate = self._sign(_name("localhost"), key, self._certificate, self._key, host="localhost")
        for name, data in (("host.pem", _pem(certificate)), ("host.key", _private(key))):
            (self.home / name).touch(0o600)
            (self.home / name).write_bytes(data)
        (self.home / "gridmap").write_text('"/O=Grid/CN=Alice" nobody\n')
        return {
            "X509_CERT_DIR": str(self.trust),
            "X509_USER_CERT": str(self.home / "host.pem"),
            "X509_USER_KEY": str(self.home / "host.key"),
            "GRIDMAP": str(self.home / "gridmap"),
        }


def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: rsa.RSAPrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
