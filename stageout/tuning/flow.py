"""The flow model: streams per stripe, stripes per node, and nodes, from the capacities on the way.

After E. Yildirim's talk (see :mod:`stageout.tuning.streams`): data flows from disks over nodes and their network
interfaces to the other side, and no arc carries more than its capacity. OPT_B is the case of equal nodes, idle at the
start: one stripe carries what the stream model promises, a node as many stripes as its interface and CPU allow. Of
equal arcs in parallel the maximum flow is their sum and of arcs in series the least, so no graph is searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageout.core.errors import StageoutError
from stageout.tuning.streams import best_streams, fit


@dataclass(frozen=True)
class CpuLine:
    """CPU utilisation in percent as a straight line over the rate: U = a + b Th."""

    a: float
    b: float

    def percent(self, rate: float) -> float:
        """Compute the utilisation at a rate."""
        return self.a + self.b * rate

    def rate_at(self, percent: float) -> float:
        """Compute the rate at which the CPU is used up to ``percent``; infinite when the rate costs nothing."""
        return max(0.0, (percent - self.a) / self.b) if self.b > 0 else math.inf


def cpu_line(samples: Sequence[tuple[float, float]]) -> CpuLine:
    """Fit (rate, percent) pairs by least squares.

    :raises StageoutError: fewer than two different rates.
    """
    count = len(samples)
    mean_rate = sum(rate for rate, _ in samples) / max(1, count)
    mean_percent = sum(percent for _, percent in samples) / max(1, count)
    spread = sum((rate - mean_rate) ** 2 for rate, _ in samples)
    if spread == 0:
        raise StageoutError("CPU utilisation must be measured at two different rates at least: take another sample")
    b = sum((rate - mean_rate) * (percent - mean_percent) for rate, percent in samples) / spread
    return CpuLine(mean_percent - b * mean_rate, b)


@dataclass(frozen=True)
class Capacities:
    """The bounds of the flow, rates in the unit of the samples.

    :param nic: of one node's interface. :param cpu_rate: of one node's CPU (:meth:`CpuLine.rate_at`).
    :param nodes: that may be used. :param network: of the way between the sites, for all nodes together.
    :param disk: of the storage system, for all nodes together.
    """

    nic: float
    nodes: int
    cpu_rate: float = math.inf
    network: float = math.inf
    disk: float = math.inf


@dataclass(frozen=True)
class Plan:
    """The parameters of a transfer.

    :param streams: per stripe (N_si). :param stripes: per node (S_x). :param nodes: N_n.
    :param rate: predicted, of all together. :param bound_by: the capacity that ends it: stripes (a node takes no more,
        see ``most_stripes``), nic, cpu, network, disk.
    """

    streams: int
    stripes: int
    nodes: int
    rate: float
    bound_by: str


def opt_b(samples: Mapping[int, float], capacities: Capacities, most_stripes: int, within: float = 0.05) -> Plan:
    """Run OPT_B for equal nodes: the fewest streams, stripes and nodes that reach the greatest possible flow.

    :param samples: streams -> rate of one stripe, from the sampling. :param most_stripes: per node, such as its cores.
    :param within: fraction of the best rate of a stripe that may be given up to need fewer streams.
    :raises NoModelError: no curve fits the samples.
    """
    model = fit(samples)
    streams = best_streams(model, max(samples), within)
    stripe = model.rate(streams)
    node, node_bound = min((most_stripes * stripe, "stripes"), (capacities.nic, "nic"), (capacities.cpu_rate, "cpu"))
    flow, bound = min((capacities.nodes * node, node_bound), (capacities.network, "network"), (capacities.disk, "disk"))
    nodes = min(capacities.nodes, math.ceil(flow / node - 1e-9))
    stripes = min(most_stripes, math.ceil(flow / nodes / stripe - 1e-9))
    return Plan(streams, max(1, stripes), max(1, nodes), flow, bound)
