"""Front ends: shell scripts that stand for a third-party transfer plugin and offer its uploads to the manager.

A front end keeps the plugin's base name: HTCondor chooses by it the variables of a job that a plugin gets. It answers
``-classad`` by itself while the plugin's file is the one that was asked, hands ``-upload`` to
:mod:`stageout.plugin.front_end`, and turns into the plugin for everything else. It needs no Python before an upload.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable

from stageout.core import durable
from stageout.core.classad_parser import parse_old

#: Runs a plugin with ``-classad`` in this environment, and returns what it prints; "" when it does not run.
Ask = Callable[[str, Mapping[str, str]], str]

_MARK = "# Front end of a transfer plugin, made by 'stageout wrap'. The sandbox manager renews it: do not edit it."
_PROXIES = (
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "FTP_PROXY",
    "ALL_PROXY",
)
#: Maximum number of bytes to read of a plugin's file, which may be a large program.
HEAD_BYTES = 4096
_PROBE = "http://stageout-probe.invalid:1"
_PROGRAM = Path(__file__).parents[1] / "plugin" / "front_end.py"
_SCRIPT = """\
#!/bin/sh
{mark}
plugin={plugin}
python={python}
program={program}
seen={seen}
case " $*" in
" -classad")
    if [ -z {proxies} ] && [ "$(stat -Lc '%s %.9Y %.9Z' "$plugin" 2>/dev/null)" = "$seen" ]; then
        printf %s {answer}
        exit 0
    fi ;;
*" -upload"* | " "[!-]*" "*://*)
    if [ -z "$STAGEOUT_MOVER" ] && [ -x "$python" ] && [ -r "$program" ]; then
        exec "$python" -I "$program" "$plugin" "$0" "${{LC_CTYPE+set}}" "$@"
    fi ;;
esac
exec "$plugin" "$@"
"""


def wrapped(text: str) -> str:
    """Find the path of the plugin behind a front end; "" when this is not the text of a front end."""
    lines = text.splitlines()
    if len(lines) < 3 or lines[1] != _MARK or not lines[2].startswith("plugin="):
        return ""
    return shlex.split(lines[2].partition("=")[2])[0]


def is_ours(text: str) -> bool:
    """Tell whether a plugin offers hand-offs: it is built on the library, or it is a front end."""
    return "stageout" in text


def plugin_of(path: Path) -> str:
    """Find the plugin behind a front end's file, as :func:`wrapped`; "" also when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return wrapped(stream.read(HEAD_BYTES).decode("utf-8", "surrogateescape"))
    except OSError:
        return ""


def is_fresh(text: str, plugin: os.stat_result) -> bool:
    """Tell whether a front end answers ``-classad`` from its cache while the plugin's file has this status."""
    return f"\nseen={shlex.quote(signature(plugin))}\n" in text


def signature(status: os.stat_result) -> str:
    """Return size and times of a file, as the script asks ``stat`` for them. Nobody can set back the last one."""
    times = (f"{time_ns // 10**9}.{time_ns % 10**9:09d}" for time_ns in (status.st_mtime_ns, status.st_ctime_ns))
    return " ".join([str(status.st_size), *times])


def write(target: Path, plugin: str, ask: Ask) -> bool:
    """Make the front end of a plugin, or renew it where its text is another. Blocks until the plugin has answered.

    :returns: False when the plugin names no methods; then nothing is written.
    :raises OSError: the plugin is missing, or the front end cannot be written.
    """
    seen = signature(Path(plugin).stat())  # before the answer: of a file that changes meanwhile nothing is believed
    plain = {name: value for name, value in os.environ.items() if name not in _PROXIES}
    answer = ask(plugin, {**plain, **dict.fromkeys(_PROXIES, _PROBE)})
    tells_proxies = _PROBE in answer  # as HTCondor's curl_plugin does: true only where none is set
    if tells_proxies:
        answer = ask(plugin, plain)
    if not parse_old(answer).text("SupportedMethods"):
        return False
    text = _SCRIPT.format(
        mark=_MARK,
        plugin=shlex.quote(plugin),
        python=shlex.quote(sys.executable),
        program=shlex.quote(str(_PROGRAM)),
        seen=shlex.quote(seen),
        proxies='"' + "".join(f"${name}" for name in _PROXIES) + '"' if tells_proxies else '""',
        answer=shlex.quote(answer),
    ).encode("utf-8", "surrogateescape")
    if not target.exists() or target.read_bytes() != text:
        durable.write_file("front-end", target, text, 0o755)
    return True


def replaced(plugins: Sequence[str], front_ends: Mapping[str, str]) -> str:
    """Write the line of configuration with front ends in the place of their plugins, or at its end."""
    kept = [front_ends.get(path, path) for path in plugins]
    return "FILETRANSFER_PLUGINS = " + ", ".join([*kept, *(path for path in front_ends.values() if path not in kept)])
