"""Print docs/developer/curl-compared.md: all cases, HTCondor's own curl_plugin beside ours.

Run ``python -m tests.curl.beside_stock [WORD...]``.

Words choose the cases whose names hold one of them; then neither the matrix nor real servers are shown. Exit status 1
when ours is worse in any.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stageout.testing.starter import PluginTable, installed
from tests.curl.beside import RELEASE, Case, Seen, lacking, run, stock_plugin, worse
from tests.curl.beside_cases import CASES
from tests.curl.matrix import EXTRA_S, Matrix, rows
from tests.curl.matrix import HEADER as MATRIX_HEADER
from tests.curl.real_table import HEADER as REAL_HEADER
from tests.curl.real_table import show as show_real_servers

ROOT = Path(__file__).resolve().parents[2]
_QUICK_S = 3.0
_PAGE = """\
# stageout_curl_plugin beside HTCondor's own

`python -m tests.curl.beside_stock` makes this page. It runs `curl_plugin` of HTCondor {release} and
`stageout_curl_plugin` on the same input, one after the other, as condor_starter does.
`tests/curl/test_beside_stock.py` compares the quick cases in CI.
In columns with two values the first one is of HTCondor's plugin.

- **arrived** means that the plugin reports success and the content is right. Failures show the exit status and the
  `ErrorType` of the result ads.
- **seconds**: empty if both plugins take less than 3 s. **requests**: HTTP requests that reached the server.
- **attributes**: how many attributes of the other's result ads ours have, and how many they have in addition.
- **worse**: failure where the other succeeds, success without the right content, much more time for the same outcome,
  or an attribute that is missing or means something else.

| case | HTCondor's | ours | seconds | requests | attributes | worse |
|---|---|---|---|---|---|---|"""

_REAL = f"""
## Real servers

The programs that `tools/install` installs, as sites run them (`tests/curl/real_servers.py`).

{REAL_HEADER}"""
_MATRIX = f"""
## Each request goes wrong

`tests/curl/matrix.py` breaks every request of `stageout_curl_plugin`, one by one and all extra ones together: every
status of 4xx and 5xx, silence, bodies without end, wrong lengths, broken connections, and answers that are not true.
Steps are named as requests or FTP commands; `after` means behind the end of the upload. A cell is **worse** if

- the file does not arrive although HTCondor's plugin brings it there;
- the plugin reports success for a file that is not there;
- a file of n bytes costs more than 2 n sent bytes in an attempt;
- a file stays behind that HTCondor's plugin does not leave;
- the transfer takes {EXTRA_S:.0f} s longer.

{MATRIX_HEADER}"""


def row(case: Case, stock: Seen, ours: Seen) -> str:
    """One line of the table."""
    theirs = {name for ad in stock.attributes() for name in ad}
    own = {name for ad in ours.attributes() for name in ad}
    kept = len(theirs & own)
    times_s = (stock.run.duration_s, ours.run.duration_s)
    cells = [
        case.name,
        outcome(stock),
        outcome(ours),
        f"{times_s[0]:.0f}, {times_s[1]:.0f}" if max(times_s) >= _QUICK_S else "",
        f"{stock.asked}, {ours.asked}" if stock.asked or ours.asked else "",
        f"{kept} of {len(theirs)}, {len(own - theirs)} more",
        "; ".join([*worse(case, stock, ours), *lacking(case, stock, ours)]) or "no",
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def outcome(seen: Seen) -> str:
    """How a call ended, in a few words."""
    if seen.ok:
        return "arrived"
    run = seen.run
    failed = [ad for ad in seen.attributes() if not ad.get("TransferSuccess")]
    kinds = [str(ad.get("TransferErrorData.ErrorType", "no ErrorType")) for ad in failed]
    end = f"signal {run.exit_signal}" if run.exit_signal else f"exit {run.exit_code}"
    wrong = "" if all(seen.arrived) or not run.succeeded else ", wrong content"
    return f"{end}{wrong} {' '.join(dict.fromkeys(kinds))}".strip()


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--fast", action="store_true", help="leave out the cases that wait for minutes")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once; times then tell less")
    options = parser.parse_args(argv)
    chosen = [
        case
        for case in CASES
        if not (case.slow and options.fast) and (not options.words or any(word in case.name for word in options.words))
    ]
    logging.basicConfig(level=logging.WARNING)  # else the FTP server prints every command
    bad = 0
    with tempfile.TemporaryDirectory(prefix="stageout-beside-") as name, ThreadPoolExecutor(options.jobs) as pool:
        plugins = [
            stock_plugin(_folder(name, "stock")),
            installed(ROOT / "plugins/stageout_curl_plugin", _folder(name, "ours")),
        ]
        tables = [PluginTable([plugin]) for plugin in plugins]

        def both(case: Case) -> tuple[Case, Seen, Seen]:
            stock, ours = (run(case, table, plugin) for table, plugin in zip(tables, plugins))
            return case, stock, ours

        print(_PAGE.format(release=RELEASE))
        for case, stock, ours in pool.map(both, chosen):
            print(row(case, stock, ours), flush=True)
            bad += bool(worse(case, stock, ours) or lacking(case, stock, ours))
        print(f"\n{len(chosen)} cases, worse in {bad}")
        if not options.words:
            print(_REAL)
            bad += show_real_servers(*plugins, note=lambda text: print(text, flush=True))
            bad += show_matrix(*plugins)
    return 1 if bad else 0


def show_matrix(stock: Path, ours: Path) -> int:
    """Print the matrix. Returns in how many cells ours is worse."""
    matrix = Matrix(stock, ours)
    matrix.run()
    print(_MATRIX, "\n".join(rows(matrix.verdicts)), sep="\n")
    worse_cells = [verdict for verdict in matrix.verdicts if verdict.worse]
    print(f"\n{len(matrix.verdicts)} cells, worse in {len(worse_cells)}")
    for verdict in worse_cells[:20]:
        print(f"- {verdict.cell}: {'; '.join(verdict.worse)}")
    for step in sorted(matrix.unknown):
        print(f"- a step without a name: {step}")
    return len(worse_cells) + len(matrix.unknown)


def _folder(home: str, name: str) -> Path:
    path = Path(home) / name
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
