"""The table of leases. Every change is on the disk before a client sees it.

The table is not safe for threads: its caller uses one thread for all calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policy_service.lease_store import LeaseStore
from policy_service.model import Lease, RequestRefused
from policy_service.site_policy import ActivePolicy
from stageout.core import log
from stageout.core.clock import Clock
from stageout.tuning.policies import Limits

_MOST_LEASES = 20_000


@dataclass(frozen=True)
class LeaseRules:
    """The administrator's settings. :param lease_s: term of a lease. :param priorities: owner -> priority."""

    limits: Limits
    lease_s: float
    priorities: Mapping[str, int] = field(default_factory=dict)


class LeaseTable:
    """All leases.

    :param store: open database; its leases go on. :param policy: policy in force.
    """

    def __init__(self, store: LeaseStore, clock: Clock, rules: LeaseRules, policy: ActivePolicy) -> None:
        self._store = store
        self._clock = clock
        self.rules = rules
        self.policy = policy
        self.expired = 0
        #: Reason why the last reconfig was refused; "" when it was accepted.
        self.reconfig_problem = ""
        loaded = store.load(clock.monotonic_s(), clock.wall_s(), rules.lease_s)
        self._leases = {lease.id: lease for lease in loaded}
        self._last_turn = max((lease.turn for lease in loaded), default=0)

    def note_reconfig(self, problem: str = "") -> None:
        """Note how the last reconfig went. :param problem: reason why it was refused, "" when it was accepted."""
        self.reconfig_problem = problem

    def change_rules(self, rules: LeaseRules, policy: ActivePolicy) -> None:
        """Go on with other rules and another policy. The old policy ends."""
        old, self.rules, self.policy = self.policy, rules, policy
        old.close()

    def leases(self) -> list[Lease]:
        """Return all leases that have not ended, by pair, owner and client."""
        self.expire()
        return sorted(self._leases.values(), key=lambda lease: (lease.pair, lease.owner, lease.client))

    def left_s(self, lease: Lease) -> float:
        """Return the seconds until a lease ends."""
        return max(0.0, lease.deadline_s - self._clock.monotonic_s())

    def request(self, owner: str, client: str, source: str, destination: str, wanted: int) -> Lease:
        """Grant streams to a client. On return the lease is on the disk.

        The same request again (after a lost answer or a restart of the client) renews the same lease.

        :returns: the lease. With 0 streams the client waits for its turn, and asks again by renewing.
        :raises RequestRefused: too many leases.
        """
        self.expire()
        key = (owner, client, source, destination)
        known = next((one for one in self._leases.values() if _identity(one) == key), None)
        if known:
            return self._decide(replace(known, wanted=wanted, in_use=known.counted))
        if len(self._leases) >= _MOST_LEASES:
            raise RequestRefused(429, f"{_MOST_LEASES} leases are out: release some, or wait until they end")
        self._last_turn += 1
        return self._decide(Lease(secrets.token_hex(12), *key, 0, 0, wanted, self._last_turn, 0.0))

    def renew(self, owner: str, name: str, wanted: int | None, in_use: int | None) -> Lease:
        """Renew a lease for another term, and let the policy decide its streams anew. On return it is on the disk.

        :param in_use: streams that the client uses now; None for all that it was granted.
        :raises RequestRefused: no such lease, or more in use than was granted.
        """
        lease = self._owned_lease(owner, name)
        lease = replace(lease, wanted=lease.wanted if wanted is None else wanted)
        return self._decide(self._with_use(lease, lease.streams if in_use is None else in_use))

    def report(self, owner: str, name: str, in_use: int, rate_mb_s: float | None) -> Lease:
        """Record a client's streams and rate. Streams that the client gave up are free on return.

        :raises RequestRefused: as :meth:`renew`.
        """
        lease = self._with_use(self._owned_lease(owner, name), in_use)
        lease = replace(lease, rate_mb_s=rate_mb_s)
        if lease.in_use != self._leases[name].in_use:
            self._save(lease)
        self._leases[name] = lease
        return lease

    def release(self, owner: str, name: str) -> None:
        """End a lease and free its streams. :raises RequestRefused: no such lease."""
        self._owned_lease(owner, name)
        self._store.save([], [name])
        del self._leases[name]

    def expire(self) -> None:
        """Free the streams of clients that did not renew their leases."""
        now = self._clock.monotonic_s()
        gone = [lease for lease in self._leases.values() if lease.deadline_s <= now]
        if gone:
            self._store.save([], [lease.id for lease in gone])
        for lease in gone:
            log.warn(
                "grant-expired",
                owner=lease.owner,
                client=lease.client,
                pair="->".join(lease.pair),
                streams=lease.counted,
            )
            del self._leases[lease.id]
        self.expired += len(gone)

    def close(self) -> None:
        """Close the database and end the policy."""
        self._store.close()
        self.policy.close()

    def _owned_lease(self, owner: str, name: str) -> Lease:
        self.expire()
        lease = self._leases.get(name)
        if lease is None or lease.owner != owner:
            raise RequestRefused(404, "no such lease (it may have ended): stop using its streams and request new ones")
        return lease

    def _with_use(self, lease: Lease, in_use: int) -> Lease:
        if in_use > lease.counted:
            raise RequestRefused(409, f"{in_use} streams in use, but only {lease.counted} are granted: use fewer")
        return replace(lease, in_use=in_use)

    def _decide(self, lease: Lease) -> Lease:
        asker = lease.grant(self._priority(lease))
        others = [one for one in self._leases.values() if one.pair == lease.pair and one.id != lease.id]
        grants = [asker, *(one.grant(self._priority(one)) for one in others)]
        streams = self.policy.decide(asker, grants, self.rules.limits)
        if bool(streams) != bool(lease.streams):
            self._last_turn += 1
            lease = replace(lease, turn=self._last_turn)
        lease = replace(lease, streams=streams, deadline_s=self._clock.monotonic_s() + self.rules.lease_s)
        self._save(lease)
        self._leases[lease.id] = lease
        return lease

    def _priority(self, lease: Lease) -> int:
        return self.rules.priorities.get(lease.owner, 0)

    def _save(self, lease: Lease) -> None:
        left_s = lease.deadline_s - self._clock.monotonic_s()
        self._store.save([(lease, self._clock.wall_s() + left_s)], [])


def _identity(lease: Lease) -> tuple[str, str, str, str]:
    return lease.owner, lease.client, lease.source, lease.destination
