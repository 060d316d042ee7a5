"""``stageout estimate``: how many streams a transfer needs and how long it takes, in the words of Stork's ClassAds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stageout.cli.exits import Exit, UsageError
from stageout.core.classads import ClassAd, ClassAdSyntaxError, decode, parse_ads, unparse
from stageout.core.errors import StageoutError
from stageout.sampling.estimate import Means, estimate, refused
from stageout.sampling.plugins import find, installed, profiles_folder
from stageout.sampling.request import read_estimation


def run(options: argparse.Namespace) -> int:
    """Answer every ad of the file in turn; each answer is printed as soon as it is known."""
    ads = _read(options.file)
    candidates = [Path(path) for path in options.plugin] or installed()
    profiles = None if options.fresh else Path(options.profiles or profiles_folder())
    means = Means(lambda method: find(method, candidates), profiles, options.most_streams, options.printed)
    status = Exit.OK
    for ad in ads:
        try:
            answer = estimate(read_estimation(ad), means)
        except StageoutError as problem:
            answer, status = refused(problem, ad.integer("dap_id")), Exit.FAILED
            print(f"stageout: {problem}", file=sys.stderr)
        print(shown(answer), flush=True)
    return status


def shown(ad: ClassAd) -> str:
    """An ad with one attribute a line."""
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
