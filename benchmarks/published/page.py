"""The report: one HTML file without outside resources, readable with a light and a dark background."""

from __future__ import annotations

import base64
import html
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plot
from published.headlines import Headline, Row
from published.measured import MISSED, NOT_ENOUGH, Figures, figure_of, verdict
from published.programs import PROGRAMS
from published.runs import Ran, clock

from stageout.tuning.streams import NoModelError, fit
from tests.harness.demo import picture
from tests.harness.demo.record import Record

NOT_MEASURED = "not measured"
_STYLE = """
:root { color-scheme: light dark; --line: #c8c8c8; --soft: #666; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #a5a5a5; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
section { margin-top: 3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--line); }
td:nth-child(3) { font-weight: 600; white-space: nowrap; }
.soft, td.none { color: var(--soft); font-weight: 400; }
td.none { white-space: normal; }
tbody th { padding-top: 1.2rem; }
.programs td:nth-child(3) { font-weight: 400; white-space: normal; }
.missed { color: var(--bad); }
figure { margin: 1.5rem 0; }
.chart svg { width: 100%; max-width: 46rem; height: auto; }
.chart svg text { fill: currentColor; }
.card { background: #fff; color: #222; padding: 0.5rem; overflow-x: auto; }
.card img, .card svg { max-width: 100%; height: auto; }
"""
_COLOURS = 32
_COLUMNS = ("", "published", "measured here", "beside, in the same run", "goal")
_PROGRAM_COLUMNS = ("", "min:s", "ran beside", "cores it used", "cores that all others used", "outcome")
_UNDECIDED = (
    f"\u201c{NOT_ENOUGH}\u201d stands where a goal was neither met nor missed clearly: fewer than three rounds and a "
    "figure near the goal, or noise larger than the distance from it. It also stands beside figures whose equal rounds "
    "differ several times."
)
_BESIDE = (
    "Programs that mostly wait ran two at a time; programs that saturate a core or the disk ran alone. The machine did "
    "other work where all others used more cores than the programs beside."
)


def page(
    headlines: Sequence[Headline],
    figures: Figures,
    ran: Mapping[str, Ran],
    runs: Sequence[Record],
    folder: Path,
    facts: Sequence[str],
) -> str:
    """Return the whole report: one table of all headlines, one of the programs, and a section for each headline.

    :param ran: programs of the report. :param runs: of the demonstration. :param folder: holds the benchmarks'
        pictures. :param facts: for the head.
    """
    title = "Published figures, measured again"
    head = "".join(f"<p>{_text(fact)}</p>" for fact in facts)
    columns = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    body = "".join(_group(f"h{at}", one, figures, ran) for at, one in enumerate(headlines))
    sections = "".join(_section(f"h{at}", one, figures, runs, folder) for at, one in enumerate(headlines))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        f"<body><h1>{title}</h1>{head}<p>{_UNDECIDED}</p>"
        f'<div class="wide"><table><thead><tr>{columns}</tr></thead>{body}</table></div>'
        f"{_programs(ran)}{sections}</body></html>\n"
    )


def _group(anchor: str, headline: Headline, figures: Figures, ran: Mapping[str, Ran]) -> str:
    """Return the rows of one headline below its title and source."""
    source = f'<a href="#{anchor}">{_text(headline.title)}</a><br><span class="soft">{_text(headline.source)}</span>'
    rows = "".join(_table_row(row, figure_of(row, figures), ran) for row in headline.rows)
    return f'\n<tbody><tr><th colspan="{len(_COLUMNS)}">{source}</th></tr>{rows}</tbody>'


def _programs(ran: Mapping[str, Ran]) -> str:
    """Return the table of the programs: what ran beside what, and how busy the machine was."""
    if not ran:
        return ""
    rows = "".join(
        f"<tr><td>{name}</td><td>{clock(one.took_s)}</td><td>{', '.join(one.beside) or 'alone'}</td>"
        f"<td>{one.cores:.2f}</td><td>{one.others_cores:.2f}</td><td>{_text(one.reason or 'measured')}</td></tr>"
        for name, one in ran.items()
    )
    head = "".join(f"<th>{column}</th>" for column in _PROGRAM_COLUMNS)
    return (
        f"\n<section><h2>Programs</h2><p>{_BESIDE}</p>"
        f'<div class="wide"><table class="programs"><tr>{head}</tr>{rows}</table></div></section>\n'
    )


def _text(words: str) -> str:
    return html.escape(words, quote=False)


def _section(anchor: str, headline: Headline, figures: Figures, runs: Sequence[Record], folder: Path) -> str:
    rows = [(row, figure_of(row, figures)) for row in headline.rows]
    shown = [_bars(anchor, rows), _curve(anchor, headline.curve)]
    if headline.timeline and runs:
        shown.append(_timeline(runs))
    shown += [_image(folder / name) for name in headline.pictures if (folder / name).exists()]
    return (
        f'\n<section id="{anchor}"><h2>{_text(headline.title)}</h2><p class="soft">{_text(headline.source)}</p>'
        f"<p><b>Published set-up.</b> {_text(headline.setup)}</p>"
        f"<p><b>Comparable.</b> {_text(headline.comparable)}</p>{''.join(shown)}</section>\n"
    )


def _table_row(row: Row, figure: dict[str, Any] | None, ran: Mapping[str, Ran]) -> str:
    start = f"<tr><td>{_text(row.what)}</td><td>{_text(row.published)}</td>"
    if figure is None:
        why = _text(why_absent(row, ran))
        return f'{start}<td class="none">{NOT_MEASURED}: {why}</td><td></td><td></td></tr>'
    value, unit = _number(figure["value"]), figure["unit"]
    if figure["met"] is False and value == _number(
        figure["goal"]
    ):  # a goal that was missed by less than the digits show
        value = f"{figure['value']:.5g}"
    peer = ""
    if figure["peer_value"] is not None:
        peer = _text(f"{_number(figure['peer_value'])} {unit}".strip() + f": {figure['peer']}")
    program = f'<br><span class="soft">{row.program}</span>'
    return f"{start}<td>{value} {_text(unit)}{program}</td><td>{peer}</td>{_goal(figure)}</tr>"


def _number(value: float) -> str:
    if value and (abs(value) >= 1000 or abs(value) < 0.001):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1g}"
    return f"{value:.3g}"


def why_absent(row: Row, ran: Mapping[str, Ran]) -> str:
    """Return the reason for a row without a figure."""
    if not row.program:
        return row.absent
    mine = [name for name, program in PROGRAMS.items() if program.script == row.program]
    failed = [ran[name].reason for name in mine if name in ran and ran[name].reason]
    if failed:
        return failed[0]
    if not any(name in ran for name in mine):
        return "its program did not run"
    return row.absent or "this run leaves it out"


def _goal(figure: dict[str, Any]) -> str:
    side, word = "", verdict(figure)
    if figure["goal"] is None:
        return f'<td class="soft">{word}</td>'
    if figure["value"] != figure["goal"]:
        side = "at most " if figure["met"] == (figure["value"] < figure["goal"]) else "at least "
    css = {MISSED: "missed", NOT_ENOUGH: "soft"}.get(word, "")
    return f'<td class="{css}">{side}{_number(figure["goal"])}, {word}</td>'


def _bars(anchor: str, rows: Sequence[tuple[Row, dict[str, Any] | None]]) -> str:
    """Draw what was measured; a published number that compares stands beside, else the peer of the run."""
    shown = []
    for row, figure in rows:
        if figure is None:
            continue
        published = {} if row.number is None else {"peer": f"published: {row.published}", "peer_value": row.number}
        shown.append({**figure, **published, "what": row.what})
    if not shown:
        return ""
    return f'<figure class="chart">{_svg(anchor, plot.picture(shown))}</figure>'


def _curve(anchor: str, published: Sequence[tuple[int, float]]) -> str:
    """Draw published rates over streams, and the curve that our solver puts through them."""
    if not published:
        return ""
    import matplotlib.pyplot as plt

    drawn, panel = plt.subplots(figsize=(7, 3.2), layout="constrained")
    panel.plot(*zip(*published), "o", color=plot.PEER, label="published rates")
    try:
        model = fit(dict(published))
        streams = [1 + step / 10 for step in range(10 * (published[-1][0] - 1) + 1)]
        panel.plot(streams, [model.rate(n) for n in streams], color=plot.VALUE, label="our solution of the formula")
    except NoModelError:
        pass
    panel.set_xlabel("streams")
    panel.set_ylabel("Mbit/s")
    panel.legend(frameon=False)
    return f'<figure class="chart">{_svg(f"{anchor}-curve", drawn)}</figure>'


def _svg(salt: str, drawn: Any) -> str:
    """Return a picture as an element of the page, in the colour of its text; identifiers differ between pictures."""
    import matplotlib
    import matplotlib.pyplot as plt

    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        drawn.savefig(written, format="svg", transparent=True, metadata=nothing)
    plt.close(drawn)
    return _inline(written.getvalue()).replace("#000000", "currentColor").replace(plot.GOAL, "currentColor")


def _inline(svg: str) -> str:
    """Return the element without the head of an XML file, and without what only other programs read."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    return re.sub(r"\s*\n\s*", "\n", element)


def _timeline(runs: Sequence[Record]) -> str:
    import matplotlib

    subtitle = "the same jobs on the same two CPU slots, without and with data slots"
    with tempfile.TemporaryDirectory() as name, matplotlib.rc_context({"svg.fonttype": "none"}):
        path = Path(name) / "timeline.svg"
        picture.draw(runs, path, subtitle=subtitle)
        return f'<figure class="card">{_inline(path.read_text())}</figure>'


def _image(path: Path) -> str:
    """Return a picture with few colours as an element of the page."""
    from PIL import Image

    written = io.BytesIO()
    Image.open(path).convert("RGB").quantize(_COLOURS).save(written, "png", optimize=True)
    data = base64.b64encode(written.getvalue()).decode()
    return f'<figure class="card"><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'
