"""The estimation service: samples a transfer with few bytes; answers how many streams it needs, how long it takes.

A transfer between two servers passes through this machine, so each leg is sampled for itself and the slower one
answers. All samples together move at most a twentieth of the bytes of the transfer: no sample is begun that is larger
than what is left of that, and the carrier refuses it.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stageout.condor.plugins import Plugin
from stageout.core.classads import ClassAd
from stageout.core.errors import StageoutError
from stageout.core.profiles import Measurement, Profile, load
from stageout.sampling.carrier import Carrier
from stageout.sampling.request import BadAd, Estimation, duration_text, stamp
from stageout.tuning.choice import Choice, choose, next_sample, sample_again, spread_of
from stageout.tuning.flow import Capacities, cpu_line, opt_b
from stageout.tuning.streams import NoModelError

SHARE = 0.05
"""Most of a transfer's bytes that sampling may move."""

MOST_STREAMS = 32
_SAMPLE_S = 4.0
_MOST_AGAIN = 10
_TIME_SHARE = 0.15
_LONGEST_S = 60.0
_LEAST_BYTES = 64 << 10
_MBIT = 1e6 / 8
_GROWTH = 1.6
_FIRST_PART, _PROBES = 8, 40
#: Numbers of streams that a choice takes, and standard deviations that a gain must exceed.
_LEAST_LEVELS, _DEVIATIONS = 3, 2.0


@dataclass
class Leg:
    """One side of a transfer and what was seen of it.

    :param samples: streams -> bytes per second. :param weights: streams -> bytes moved for it.
    :param spent_s: on sampling. :param sampled_bytes: bytes moved by sampling.
    :param stored: they come from a stored profile.
    """

    url: str
    upload: bool
    samples: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    runs: list[Measurement] = field(default_factory=list)
    spent_s: float = 0.0
    sampled_bytes: int = 0
    stored: bool = False
    multi_stream: bool = True
    choice: Choice = field(default_factory=lambda: Choice(1, 0.0, "samples"))

    @property
    def spread(self) -> float:
        """Return the variance between samples of the same number of streams."""
        kept = [run for run in self.runs if run.moved_bytes and not self.stored]
        streams = [run.streams if self.multi_stream else run.concurrency for run in kept]
        return spread_of((n, run.rate_bytes_per_s, float(run.moved_bytes)) for n, run in zip(streams, kept))


@dataclass(frozen=True)
class Means:
    """The bounds of an estimate.

    :param find: the plugin for a URL scheme. :param profiles: directory of stored profiles; None: not looked at.
    :param most_streams: never sample or answer more.
    """

    find: Callable[[str], Plugin]
    profiles: Path | None = None
    most_streams: int = MOST_STREAMS
    settings: Mapping[str, str] = field(default_factory=dict)


def estimate(asked: Estimation, means: Means) -> ClassAd:
    """Answer one ad.

    :raises StageoutError: no plugin, or the transfers failed; the text is the plugin's.
    """
    sides = _sides(asked)
    most_bytes = int(asked.file_bytes * SHARE) // len(sides)
    legs = [_leg(asked, url, upload, means, most_bytes) for url, upload in sides]
    return _answer(asked, legs)


def _sides(asked: Estimation) -> list[tuple[str, bool]]:
    """Return URL and direction of each leg over a network; of a copy between two directories the writing one."""
    remote = [(url, up) for url, up in ((asked.source, False), (asked.target, True)) if not url.startswith("file://")]
    return remote or [(asked.target, True)]


def _leg(asked: Estimation, url: str, upload: bool, means: Means, most_bytes: int) -> Leg:
    method = urlsplit(url).scheme.lower()
    plugin = means.find(method)
    leg = Leg(url, upload, multi_stream=plugin.multi_stream(method, upload))
    known = load(means.profiles, urlsplit(url).netloc.lower()) if means.profiles else None
    if known is not None and known.fresh() and _of_profile(leg, known):
        leg.choice = _choose(leg)
        return leg
    if not upload and not leg.multi_stream:
        text = f"{plugin.path.name} cannot fetch a part of a {method}:// file: swap src_url and dest_url"
        raise BadAd(f"{text}, or store a profile (stageout profile {url})")
    with ExitStack() as stack:
        carrier = _carrier(asked, plugin, leg, means, stack)
        carrier.most_bytes = max(1, most_bytes)
        _sample(carrier, leg, asked, means)
    leg.choice = _choose(leg)
    return leg


def _carrier(asked: Estimation, plugin: Plugin, leg: Leg, means: Means, stack: ExitStack) -> Carrier:
    local = asked.source if leg.upload else asked.target
    folder = _local_folder(local) if asked.disk and local.startswith("file://") else memory_folder()
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".stageout-estimate-", dir=folder)))
    settings = dict(means.settings)
    if asked.proxy not in ("", "default"):
        settings["X509_USER_PROXY"] = asked.proxy
    carrier = Carrier(plugin, leg.url, leg.upload, place, _LONGEST_S, steady=True, settings=settings)
    stack.callback(carrier.tidy, 1 if leg.multi_stream else means.most_streams)
    return carrier


def _local_folder(url: str) -> Path:
    path = Path(unquote(urlsplit(url).path))
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadAd(f'{url}: disk_transfer = "yes" needs a directory here that you may write to')
    return folder


def memory_folder() -> Path:
    """Find a directory in memory where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _sample(carrier: Carrier, leg: Leg, asked: Estimation, means: Means) -> None:
    """Take samples until the rule says that they suffice; then more of them for what may still be moved."""
    _first(carrier, leg, asked)
    again = 0
    while again < _MOST_AGAIN:
        left_bytes = carrier.left_bytes
        streams = next_sample(leg.samples, means.most_streams)
        if streams is not None:
            size_bytes = _size(leg.samples, streams, asked, left_bytes)
            enough = size_bytes >= _LEAST_BYTES
        else:
            again += 1
            streams = sample_again(leg.samples, leg.weights, leg.spread)
            size_bytes = min(int(_SAMPLE_S * _expected(leg, streams)), asked.sample_bytes or asked.file_bytes)
            enough = streams <= size_bytes <= left_bytes and not _long_enough(leg, asked)
        if not enough:
            return  # what is known must do
        _one(carrier, leg, streams, size_bytes)


def _first(carrier: Carrier, leg: Leg, asked: Estimation) -> None:
    """Take the first sample; a short one only tells how large it must be."""
    budget_bytes = carrier.most_bytes
    most = asked.sample_bytes or budget_bytes
    size_bytes = max(1, min(budget_bytes // _PROBES, most))
    _one(carrier, leg, 1, size_bytes)
    wanted = min(int(_SAMPLE_S * leg.samples[1]), budget_bytes // _FIRST_PART, most)
    if wanted > 2 * size_bytes:
        leg.samples.clear()
        leg.weights.clear()
        leg.runs.clear()
        _one(carrier, leg, 1, wanted)


def _long_enough(leg: Leg, asked: Estimation) -> bool:
    """Tell whether more sampling would take too long beside the transfer itself."""
    return leg.spent_s > _TIME_SHARE * asked.file_bytes / max(leg.samples.values())


def _one(carrier: Carrier, leg: Leg, streams: int, size_bytes: int) -> None:
    """Take one sample; with earlier ones of the same number of streams it makes one longer sample."""
    run = carrier.run(carrier.streams(streams, size_bytes))
    leg.runs.append(run)
    rate, moved = max(1.0, run.rate_bytes_per_s), float(max(1, run.moved_bytes))
    seconds = moved / rate
    if streams in leg.samples:
        seconds += leg.weights[streams] / leg.samples[streams]
        moved += leg.weights[streams]
    leg.samples[streams], leg.weights[streams] = moved / seconds, moved
    leg.spent_s, leg.sampled_bytes = carrier.spent_s, carrier.moved_bytes


def _expected(leg: Leg, streams: int) -> float:
    """Return the rate to expect: that of the nearest number of streams that was sampled."""
    return leg.samples[min(leg.samples, key=lambda sampled: abs(sampled - streams))]


def _size(samples: Mapping[int, float], streams: int, asked: Estimation, left_bytes: int) -> int:
    """Choose the size of the next sample: a few seconds, at most half of the budget that is left, at most ``-s``."""
    last = max(samples)
    before = [rate for sampled, rate in samples.items() if sampled < last]
    grown = min(_GROWTH, max(1.0, samples[last] / max(before))) if before else _GROWTH
    grown = grown if streams > last else 1.0
    size_bytes = min(max(0, left_bytes) // 2, int(_SAMPLE_S * grown * samples[last]))
    return min(size_bytes, asked.sample_bytes) if asked.sample_bytes else size_bytes


def _of_profile(leg: Leg, known: Profile) -> bool:
    """Take samples from a stored profile: of the largest files in it, with nothing else varied."""
    wanted = [run for run in known.runs if run.direction == ("upload" if leg.upload else "download")]
    wanted = [run for run in wanted if not run.block_bytes and run.reserved is None]
    largest = max((run.file_bytes * (1 if leg.multi_stream else run.concurrency) for run in wanted), default=0)
    for run in wanted:
        streams, others = (run.streams, run.concurrency) if leg.multi_stream else (run.concurrency, run.streams)
        if others == 1 and run.file_bytes * (1 if leg.multi_stream else run.concurrency) >= largest // 2:
            leg.samples[streams] = max(leg.samples.get(streams, 0.0), run.rate_bytes_per_s)
            leg.runs.append(run)
    leg.stored = len(leg.samples) >= 2
    if not leg.stored:
        leg.samples.clear()
        leg.runs.clear()
    return leg.stored


def _choose(leg: Leg) -> Choice:
    return choose(leg.samples, weights=leg.weights or None, spread=leg.spread)


def _answer(asked: Estimation, legs: list[Leg]) -> ClassAd:
    slow = min(legs, key=lambda leg: leg.choice.rate)
    rate, sampled_bytes = slow.choice.rate, sum(leg.sampled_bytes for leg in legs)
    answer = ClassAd(
        {
            "status": "request_completed",
            "dap_id": asked.dap_id,
            "file_size_in_bytes": asked.file_bytes,
            "max_throughput": rate / _MBIT,
            "optimal_streams": slow.choice.streams,
            "streams_are": "of one file" if slow.multi_stream else "files at once",
            "est_time": duration_text(asked.file_bytes / rate),
            "optimization_cost": sum(leg.spent_s for leg in legs),
            "sampled_bytes": sampled_bytes,
            "sampled_share": sampled_bytes / asked.file_bytes,
            "from_profile": all(leg.stored for leg in legs),
            "enough_data": not (doubt := _doubt(slow)),
            **({"not_enough_data": doubt} if doubt else {}),
            "samples": [
                {"leg": "dest" if leg.upload else "src", "streams": streams, "throughput": value / _MBIT}
                for leg in legs
                for streams, value in sorted(leg.samples.items())
            ],
        }
    )
    if asked.nic:
        _add_plan(answer, asked, slow)
    answer["timestamp"] = stamp()
    return answer


def _doubt(leg: Leg) -> str:
    """Return the reason why the samples do not show the best number of streams; "" when they do."""
    if len(leg.samples) < _LEAST_LEVELS:
        return f"only {len(leg.samples)} of at least {_LEAST_LEVELS} numbers of streams could be sampled"
    one, chosen = min(leg.samples), min(leg.samples, key=lambda streams: abs(streams - leg.choice.streams))
    if leg.stored or not leg.weights or one == chosen:
        return ""
    gain = leg.samples[chosen] / leg.samples[one] - 1
    error = _DEVIATIONS * math.sqrt(leg.spread * (1 / leg.weights[one] + 1 / leg.weights[chosen]))
    if gain > error:
        return ""
    return f"the gain of {gain:.0%} over {one} is within the error of the samples ({error:.0%})"


def _add_plan(answer: ClassAd, asked: Estimation, leg: Leg) -> None:
    """Add stripes and nodes by the flow model, where the ad tells what the nodes' interfaces carry."""
    rates = {streams: rate / _MBIT for streams, rate in leg.samples.items()}
    cores = os.cpu_count() or 1
    cpu_rate = float("inf")
    pairs = [(run.rate_bytes_per_s / _MBIT, 100.0 * run.client_cpu_s / max(run.seconds, 1e-3)) for run in leg.runs]
    try:
        cpu_rate = cpu_line(pairs).rate_at(100.0 * cores)
        plan = opt_b(rates, Capacities(asked.nic, asked.nodes, max(cpu_rate, 1e-3)), asked.stripes)
    except (NoModelError, StageoutError) as problem:
        answer["plan_problem"] = str(problem)
        return
    answer.update(
        {
            "optimal_stripes": plan.stripes,
            "optimal_nodes": plan.nodes,
            "streams_per_stripe": plan.streams,
            "striped_throughput": plan.rate,
            "bound_by": plan.bound_by,
        }
    )


def refused(problem: Exception, dap_id: int = 0) -> ClassAd:
    """Make the answer to an ad that could not be answered."""
    return ClassAd({"status": "request_failed", "dap_id": dap_id, "error": str(problem), "timestamp": stamp()})
