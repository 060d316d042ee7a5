"""``stageout estimate``: estimate streams and duration of a transfer, with the attributes of Stork's ClassAds."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from stageout.cli.arguments import add_json, add_measuring, streams
from stageout.cli.exits import Exit, UsageError
from stageout.cli.results import tell
from stageout.condor.plugins import find, installed, profiles_folder
from stageout.core.classad_parser import parse_ads
from stageout.core.classads import ClassAd, ClassAdSyntaxError, decode, unparse
from stageout.core.errors import StageoutError
from stageout.sampling.estimate import Means, estimate, refused
from stageout.sampling.request import read_estimation

DESCRIPTION = """\
Estimate streams, rate and duration of transfers. FILE holds ClassAds with dap_type = "Estimation", src_url, dest_url
and filesize. The command sends a few samples with the installed transfer plugins, at most a twentieth of filesize.
Samples of uploads stay at the destination as empty files named .stageout-sample-N.

exit status: 0 all were answered, 1 one could not be answered (its answer gives the reason), 64 FILE cannot be read"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("file", metavar="FILE", help="file of ClassAds, - for standard input")
    command.add_argument(
        "--most-streams", metavar="N", type=streams, default=32, help="largest number of streams (default: 32)"
    )
    command.add_argument("--fresh", action="store_true", help="take samples even if a stored profile exists")
    add_json(command)
    add_measuring(command)


def run(options: argparse.Namespace) -> int:
    """Answer every ad of the file in turn. Print each answer as soon as it is known."""
    ads = _read(options.file)
    candidates = [Path(path) for path in options.plugin] or installed()
    profiles = None if options.fresh else Path(options.profiles or profiles_folder())
    means = Means(lambda method: find(method, candidates), profiles, options.most_streams)
    status = Exit.OK
    for ad in ads:
        try:
            answer = estimate(read_estimation(ad), means)
            if answer.text("not_enough_data"):
                text = "not enough data to choose a number of streams"
                print(f"stageout: {text}: {answer.text('not_enough_data')}", file=sys.stderr)
        except StageoutError as problem:
            answer, status = refused(problem, ad.integer("dap_id")), Exit.FAILED
            print(f"stageout: {problem}", file=sys.stderr)
        if options.json:
            tell({**{name: _plain(value) for name, value in answer.items()}, "timestamp": int(time.time())})
        else:
            print(shown(answer), flush=True)
    return status


def _plain(value: Any) -> Any:
    """Convert a value of an ad for JSON."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, ClassAd) else value


def shown(ad: ClassAd) -> str:
    """Write an ad with one attribute in each line."""
    return "[\n" + ";\n".join(f"  {name} = {unparse(value)}" for name, value in ad.items()) + "\n]"


def _read(name: str) -> list[ClassAd]:
    try:
        text = sys.stdin.read() if name == "-" else decode(Path(name).read_bytes())
        ads = list(parse_ads(text))
    except OSError as problem:
        raise UsageError(f"cannot read {name}: {problem.strerror}") from None
    except ClassAdSyntaxError as problem:
        raise UsageError(f"{name} is no ClassAd: {problem}; attributes stand in [ ] and end with a semicolon") from None
    if not ads:
        raise UsageError(f"there is no ClassAd in {name}")
    return ads
