"""The service's ad in the pool's collector, for ``condor_status``. Nothing depends on it.

HTCondor's bindings hold the interpreter while they wait for the network, so a child process publishes the ad:
``python -m policy_service.advert LOCAL_NAME`` reads one ad as JSON from stdin and publishes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping

from policy_service.model import RequestRefused
from policy_service.views import LeaseSnapshot
from stageout import __version__
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.config import condor_settings

POLICY_AD = "StageOutPolicy"
_INTERVAL_S = 300.0
_LIFETIME_S = 900
_PUBLISH_TIMEOUT_S = 20.0
_PROBLEM_CHARS = 300


def make_ad(url: str, snapshot: LeaseSnapshot) -> dict[str, str | int]:
    """Return the service's ad. :param url: URL on which the service listens."""
    leases = [lease for lease, _ in snapshot.leases]
    return {
        "MyType": POLICY_AD, "Name": f"policy@{url.partition('://')[2]}", "StageOutVersion": __version__,
        "StageOutPolicyURL": url, "StageOutPolicyName": snapshot.policy, "StageOutPolicyMaxPair": snapshot.max_pair,
        "StageOutPolicyLeases": len(leases), "StageOutPolicyStreams": sum(lease.counted for lease in leases),
        "StageOutPolicyProblem": " ".join(snapshot.problems), "ClassAdLifetime": _LIFETIME_S,
    }  # fmt: skip


class CollectorAdvertiser:
    """Publisher of the service's ad, every five minutes.

    :param local_name: local name of the daemon. :param facts: makes the ad.
    """

    def __init__(self, local_name: str, facts: Callable[[], Awaitable[Mapping[str, str | int]]]) -> None:
        self._argv = module_command("policy_service.advert", local_name)
        self._facts = facts
        self._problem: str | None = None

    async def run(self) -> None:
        """Publish until cancelled. Log a collector that refuses the ad, and try again."""
        while True:
            with contextlib.suppress(RequestRefused):  # the leases' disk fails, which is in the log already
                self._log_change(await self._publish(json.dumps(await self._facts())))
            await asyncio.sleep(_INTERVAL_S)

    async def _publish(self, ad: str) -> str:
        """Return the reason why the ad is not in the collector; "" when it is."""
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *self._argv, stdin=pipe, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
            )
        except OSError as problem:
            return str(problem)
        try:
            _, errors = await asyncio.wait_for(child.communicate(ad.encode("ascii")), _PUBLISH_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"the collector did not answer within {_PUBLISH_TIMEOUT_S:.0f} s"
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if not child.returncode:
            return ""
        return errors.decode(errors="replace").strip()[-_PROBLEM_CHARS:] or f"status {child.returncode}"

    def _log_change(self, problem: str) -> None:
        if problem != self._problem:
            if problem:
                log.warn("ad-publish-failed", problem=problem)
            else:
                log.event("ad-published")
        self._problem = problem


def main() -> int:
    """Publish the ad on stdin in all collectors. With several collectors, one that takes the ad is enough."""
    import classad2
    import htcondor2

    ad = classad2.ClassAd(json.load(sys.stdin))
    problems = []
    hosts = condor_settings(sys.argv[1]).condor("COLLECTOR_HOST").replace(",", " ").split()
    for host in hosts:
        try:
            htcondor2.Collector(host).advertise([ad], "UPDATE_AD_GENERIC")
        except Exception as problem:
            problems.append(str(problem) or type(problem).__name__)
    if len(problems) == len(hosts):
        print(*problems or ["COLLECTOR_HOST is not set"], sep="; ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
