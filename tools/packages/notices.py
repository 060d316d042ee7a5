"""Third-party notices and the list of components (SBOM): ``python tools/packages/notices.py WHEEL... >NOTICES``.

Both are read from the wheels. The tables below name what a wheel has of other authors without saying so: the native
libraries that are copied into it, and what is linked into it. A library that no table has ends the build.
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LICENSES = Path(__file__).resolve().parent / "licenses"
_KRB5 = (
    "Brian-Gladman-2-Clause AND BSD-2-Clause AND BSD-3-Clause AND BSD-4-Clause AND CMU-Mach-nodoc AND FSFULLRWD"
    " AND HPND AND HPND-export2-US AND HPND-export-US AND HPND-export-US-acknowledgement AND HPND-export-US-modify"
    " AND ISC AND MIT AND MIT-CMU AND OLDAP-2.8 AND OpenVision"
)
_GNU = "LGPL-3.0-or-later OR GPL-2.0-or-later"
_GNU_TEXTS = (LICENSES / "LGPL-3.0.txt", LICENSES / "GPL-3.0.txt")


class Library(NamedTuple):
    """A library of other authors within a wheel.

    :param version: pattern of what the binary says of itself, with the version as group 1; "" where it says nothing.
    """

    name: str
    license: str
    texts: Sequence[Path]
    source: str
    version: str = ""


_OPENSSL = Library(
    "OpenSSL", "Apache-2.0", [ROOT / "LICENSE"], "https://openssl-library.org", r"OpenSSL (\d[\d.]+\d[a-z]*)"
)
_CURL = Library("curl", "curl", [LICENSES / "curl.txt"], "https://curl.se", r"libcurl/(\d[\d.]+\d)")
_MIT_KRB5 = Library("krb5", _KRB5, [LICENSES / "krb5.txt"], "https://web.mit.edu/kerberos", r"krb5-(\d[\d.]+\d)")
_BROTLI = Library("brotli", "MIT", [LICENSES / "brotli.txt"], "https://github.com/google/brotli")
_NGTCP2 = Library("ngtcp2", "MIT", [LICENSES / "ngtcp2.txt"], "https://nghttp2.org/ngtcp2")
#: By the name of the file, up to the hash that auditwheel puts into it.
LIBRARIES = {
    "libbrotlicommon": _BROTLI,
    "libbrotlidec": _BROTLI,
    "libcom_err": _MIT_KRB5,
    "libcrypto": _OPENSSL,
    "libcurl": _CURL,
    "libgssapi_krb5": _MIT_KRB5,
    "libidn2": Library("libidn2", _GNU, [LICENSES / "libidn2.txt", *_GNU_TEXTS], "https://www.gnu.org/software/libidn"),
    "libk5crypto": _MIT_KRB5,
    "libkrb5": _MIT_KRB5,
    "libkrb5support": _MIT_KRB5,
    "libnghttp2": Library("nghttp2", "MIT", [LICENSES / "nghttp2.txt"], "https://nghttp2.org"),
    "libnghttp3": Library("nghttp3", "MIT", [LICENSES / "nghttp3.txt"], "https://nghttp2.org/nghttp3"),
    "libngtcp2": _NGTCP2,
    "libngtcp2_crypto_ossl": _NGTCP2,
    "libpsl": Library("libpsl", "MIT", [LICENSES / "libpsl.txt"], "https://rockdaboot.github.io/libpsl"),
    # Of the authors of nghttp3, under the same words.
    "libsfparse": Library("sfparse", "MIT", [LICENSES / "nghttp3.txt"], "https://github.com/ngtcp2/sfparse"),
    "libssh2": Library(
        "libssh2", "BSD-3-Clause", [LICENSES / "libssh2.txt"], "https://libssh2.org", r"libssh2_([\d.]+\d)"
    ),
    "libssl": _OPENSSL,
    "libunistring": Library("libunistring", _GNU, _GNU_TEXTS, "https://www.gnu.org/software/libunistring"),
}
#: Linked into modules of these packages.
_LINKED = {"cryptography": _OPENSSL}
#: Texts that packages write in place of an SPDX expression.
_SPDX = {
    "Apache 2": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache-2.0 AND MIT": "Apache-2.0 AND MIT",
    "LGPL/MIT": "LGPL-2.1-or-later OR MIT",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
}
_KNOWN = re.compile(r"(Apache-2\.0|MIT-0|MIT|PSF-2\.0|MPL-2\.0|BSD-[23]-Clause|LGPL-2\.1-(only|or-later)|ISC)")
_OWN = "stageout"


class Component(NamedTuple):
    """Something that is delivered. :param version: "" where it does not say one. :param part_of: a wheel's package."""

    name: str
    version: str
    license: str
    texts: Sequence[str]
    source: str
    sha256: str = ""
    part_of: str = ""


def components(wheels: Iterable[Path]) -> list[Component]:
    """Return what wheels consist of, each once. :raises SystemExit: a licence or a library is not known."""
    found = {(one.name.lower(), one.part_of, one.version): one for path in wheels for one in _of_wheel(path)}
    # Of several libraries of one project, perhaps only one says its version.
    said = {key[:2] for key in found if key[2]}
    return [found[key] for key in sorted(found) if key[2] or key[:2] not in said]


def _of_wheel(path: Path) -> Iterator[Component]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (about,) = (name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        facts = email.message_from_bytes(wheel.read(about))
        folder = about.partition("/")[0]
        package = f"{facts['Name']} {facts['Version']}"
        texts = [_text(wheel.read(name)) for name in names if _is_license(name, folder)]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if facts["Name"] == _OWN:
            texts = [(ROOT / "LICENSE").read_text()]
        source = f"https://pypi.org/project/{facts['Name']}/{facts['Version']}/"
        yield Component(facts["Name"], facts["Version"], license_of(facts), texts, source, digest)
        for name in names:
            if name == "stageout_web/static/uplot.LICENSE":
                script = _text(wheel.read(name.replace(".LICENSE", ".js")))
                version = re.search(r"uPlot (\d[\d.]+\d)", script)
                text = _text(wheel.read(name))
                yield Component("uPlot", version[1] if version else "", "MIT", [text], "https://github.com/leeoniya/uPlot",
                                part_of=package)  # fmt: skip
        for name in names:
            library = None
            if match := re.fullmatch(r"[^/]+\.libs/(lib[^/]+?)(-[0-9a-f]{8})?\.so[\d.]*", name):
                library = LIBRARIES.get(match[1])
                if library is None:
                    sys.exit(f"{path.name} has {name}, which tools/packages/notices.py does not know: add its licence")
            elif name.endswith(".so") and facts["Name"] in _LINKED:
                library = _LINKED[facts["Name"]]
            if library:
                yield _of_library(library, wheel.read(name), package)


def _of_library(library: Library, binary: bytes, package: str) -> Component:
    match = re.search(library.version.encode(), binary) if library.version else None
    texts = [path.read_text() for path in library.texts]
    return Component(
        library.name, match[1].decode() if match else "", library.license, texts, library.source, part_of=package
    )


def license_of(facts: Message) -> str:
    """Return a package's licence as an SPDX expression. :raises SystemExit: it is not known."""
    classifiers = [line for line in facts.get_all("Classifier", []) if line.startswith("License ::")]
    for text in (facts["License-Expression"], facts["License"], *classifiers):
        found = _SPDX.get(text or "", text or "")
        if found and not re.sub(r"[()]|\b(AND|OR)\b|\s", "", _KNOWN.sub("", found)):
            return found
    said = facts["License-Expression"] or facts["License"]
    sys.exit(f"{facts['Name']}: no licence that tools/packages/notices.py knows: {said!r}, {classifiers}")


def _is_license(name: str, folder: str) -> bool:
    parts = name.split("/")
    is_one = re.search(r"licen[cs]e|copying|notice", parts[-1], re.I) or "licenses" in parts[1:-1]
    return parts[0] == folder and bool(parts[-1]) and bool(is_one) and not parts[-1].startswith("AUTHORS")


def _text(data: bytes) -> str:
    return data.decode(errors="replace").replace("\r\n", "\n").strip() + "\n"


def expression(found: Iterable[Component]) -> str:
    """Return the licence of all of them together."""
    parts = {part for one in found for part in _terms(one.license)}
    return " AND ".join(f"({part})" if " OR " in part else part for part in sorted(parts))


def _terms(text: str) -> list[str]:
    return [text.strip("()")] if " OR " in text else [part.strip("()") for part in text.split(" AND ")]


def notices(found: Sequence[Component]) -> str:
    """Return what is delivered beside stageout itself, with the licence of each. A text stands there once."""
    others = [one for one in found if one.name != _OWN]
    texts: dict[str, str] = {}
    lines = ["Software of other authors that this file's package contains. Their licences are below.", ""]
    for one in others:
        within = f", within {one.part_of}" if one.part_of else ""
        lines += [
            f"{one.name} {one.version}".strip() + within,
            f"    licence: {one.license}",
            f"    source:  {one.source}",
        ]
        for text in one.texts:
            number = texts.setdefault(text, f"[{len(texts) + 1}]")
            lines.append(f"    text:    {number}")
    for text, number in texts.items():
        lines += ["", "-" * 78, number, "-" * 78, text.rstrip("\n")]
    return "\n".join(lines) + "\n"


def sbom(version: str, found: Sequence[Component], timestamp: str) -> str:
    """Return the components as CycloneDX 1.6. The same components make the same text."""
    listed = [_as_cyclonedx(one) for one in found if one.name != _OWN]
    own: dict[str, Any] = {
        "type": "application",
        "name": _OWN,
        "version": version,
        "purl": f"pkg:pypi/{_OWN}@{version}",
    }
    own["bom-ref"] = own["purl"]
    own["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": own},
        "components": listed,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [one["bom-ref"] for one in listed]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    document["serialNumber"] = f"urn:uuid:{serial}"
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _as_cyclonedx(one: Component) -> dict[str, Any]:
    kind = "generic" if one.part_of else "pypi"
    at = f"@{one.version}" if one.version else ""
    name = one.name if one.part_of else re.sub(r"[-_.]+", "-", one.name).lower()
    entry: dict[str, Any] = {"type": "library", "name": one.name, "purl": f"pkg:{kind}/{name}{at}"}
    entry["bom-ref"] = f"{entry['purl']}#{one.part_of}" if one.part_of else entry["purl"]
    entry["licenses"] = [{"expression": one.license}]
    entry["externalReferences"] = [{"type": "website", "url": one.source}]
    if one.version:
        entry["version"] = one.version
    if one.sha256:
        entry["hashes"] = [{"alg": "SHA-256", "content": one.sha256}]
    if one.part_of:
        entry["properties"] = [{"name": "stageout:part-of", "value": one.part_of}]
    return entry


if __name__ == "__main__":
    sys.stdout.write(notices(components(map(Path, sys.argv[1:]))))
