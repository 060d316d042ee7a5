"""The agents whose orders this manager obeys: one public key for each access point, and the ads that it signs.

Any daemon of the pool can write any ad into the collector, so an ad proves nothing by itself. How a key becomes that
of an access point, strongest first:

- ``listed``: STAGEOUT_AGENT_KEYS of this node's configuration;
- ``claim``: a job of that access point brought it (StageOutAgentKey, set by the AP's transform). It came over the
  claim's session, schedd to shadow to startd, where no other daemon can write;
- ``first``: the first signed notice in that access point's name.

A key stays until its own holder names a successor. The ledger has the pinned key before the first order is applied.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sandbox_manager.custody.ledger import get_meta, set_meta
from sandbox_manager.intake.agents import AgentTable
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.config import ConfigError
from stageout.core.signing import succeeds
from stageout.core.synchronous import NO_REASON, Reason
from stageout.wire.custody import (
    AGENT_AD,
    ORDERS_AD,
    AgentNotice,
    BadPayload,
    OrderSheet,
    check_signature,
    payload_of,
    read_notice,
    read_orders,
)

_META = "agent_keys"
_SILENT_S = 86400.0
_REFUSALS_KEPT = 100
_FORMER_KEPT = 8
_PINS_KEPT = 1000


class Pin(NamedTuple):
    """The key of one access point, and how it was learnt.

    :param former: keys that it has replaced: jobs that were submitted before still bring them.
    """

    key: str
    source: str
    former: tuple[str, ...] = ()


def read_listed(text: str) -> dict[str, str]:
    """Read STAGEOUT_AGENT_KEYS. :raises ConfigError: it is not SCHEDD=KEY, separated by blanks or commas."""
    listed = {}
    for item in text.replace(",", " ").split():
        schedd, mark, key = item.partition("=")
        if not mark or not key.startswith("ed25519:"):
            raise ConfigError(f"STAGEOUT_AGENT_KEYS: cannot read {item!r}; write SCHEDD=ed25519:...")
        listed[schedd] = key
    return listed


@dataclass
class AgentKeys:
    """Keys of the access points.

    :param clock: an access point that was silent for a day, and of which nothing is held, is met anew.
    """

    clock: Clock
    listed: Mapping[str, str] = field(default_factory=dict)
    unsaved: bool = False
    _pins: dict[str, Pin] = field(default_factory=dict)
    _noticed_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started_s = self.clock.monotonic_s()

    def list_anew(self, listed: Mapping[str, str]) -> None:
        """Let these keys of the configuration count from now on."""
        self.listed = listed

    def pop_unsaved(self) -> bool:
        """Tell whether something was learnt that is not saved. The caller saves it, or calls :meth:`not_saved`."""
        was, self.unsaved = self.unsaved, False
        return was

    def not_saved(self) -> None:
        """Save what was learnt the next time."""
        self.unsaved = True

    def load(self, db: sqlite3.Connection) -> None:
        """Read what was learnt before."""
        rows = json.loads(get_meta(db, _META, "{}"))
        self._pins = {name: Pin(key, source, tuple(former)) for name, (key, source, former) in rows.items()}

    def save(self, db: sqlite3.Connection) -> None:
        """Write what was learnt."""
        set_meta(db, _META, json.dumps(self._pins))

    def pin_of(self, schedd: str) -> Pin | None:
        """Return the key by which this access point's orders are checked."""
        if schedd in self.listed:
            return Pin(self.listed[schedd], "listed")
        return None if self.listed else self._pins.get(schedd)

    def claimed(self, schedd: str, key: str) -> Reason:
        """Learn the key of its access point that a job brought. Return why the job's output cannot be taken."""
        known = self.pin_of(schedd)
        if self.listed and known is None:
            return Reason("AgentKey", f"STAGEOUT_AGENT_KEYS of this node does not name {schedd}")
        if not key:
            return NO_REASON
        if known is None or (known.source == "first" and key not in (known.key, *known.former)):
            self._pin(schedd, key, "claim")
        elif key not in (known.key, *known.former):
            than = f"than this node knows ({known.source}); see docs/administrator/security.md"
            return Reason("AgentKey", f"the job brings another key of {schedd} {than}")
        elif known.source == "first" and known.key == key:
            self._pin(schedd, key, "claim", known.former)
        return NO_REASON

    def check_notice(self, notice: AgentNotice, held: bool) -> None:
        """Check a notice with a good signature of its own key, and remember the key.

        :param held: something of that access point's jobs is in the ledger.
        :raises BadPayload: its key is not that of the access point.
        """
        known, now_s = self.pin_of(notice.schedd), self.clock.monotonic_s()
        if known is None:
            if self.listed:
                raise BadPayload(f"STAGEOUT_AGENT_KEYS does not name {notice.schedd}")
            if len(self._pins) >= _PINS_KEPT:
                raise BadPayload(f"{len(self._pins)} access points are known already; list yours (STAGEOUT_AGENT_KEYS)")
            self._pin(notice.schedd, notice.key, "first")
        elif known.key != notice.key:
            silent_s = now_s - self._noticed_s.get(notice.schedd, self._started_s)
            if known.source != "listed" and succeeds(notice.key, known.key, notice.vouches):
                self._pin(notice.schedd, notice.key, known.source, (*known.former, known.key)[-_FORMER_KEPT:])
            elif known.source == "first" and not held and silent_s > _SILENT_S:
                self._pin(notice.schedd, notice.key, "first")
            else:
                raise BadPayload(f"its key is {notice.key}, that of {notice.schedd} is {known.key} ({known.source})")
        self._noticed_s[notice.schedd] = now_s

    def _pin(self, schedd: str, key: str, source: str, former: tuple[str, ...] = ()) -> None:
        log.warn("agent-key-learned", schedd=schedd, key=key, learnt=source)
        self._pins[schedd] = Pin(key, source, former)
        self.unsaved = True

    def facts(self) -> list[dict[str, str]]:
        """Return the pinned keys for people."""
        names = sorted({*self.listed, *self._pins})
        pins = [(name, self.pin_of(name)) for name in names]
        return [{"Schedd": name, "Key": pin.key, "Learnt": pin.source} for name, pin in pins if pin]


class OrderVerifier:
    """Filter of messages: an access point must have signed them, for this manager, about its own jobs.

    :param name: of this manager. :param key: its public key. :param held: schedds of the sandboxes in the ledger.
    """

    def __init__(self, name: str, key: str, agents: AgentTable, keys: AgentKeys) -> None:
        self._name = name
        self._key = key
        self._agents = agents
        self._keys = keys
        self._refused: dict[str, str] = {}
        self._newest: dict[str, int] = {}

    def sheets(self, ads: Iterable[Mapping[str, Any]], held: frozenset[str]) -> list[OrderSheet]:
        """Hear the notices, then return the orders that may be obeyed. The rest is named in the log, once."""
        found = sorted((dict(ad) for ad in ads), key=lambda ad: ad.get("MyType") != AGENT_AD)
        sheets = []
        for ad in found:
            try:
                if ad.get("MyType") == AGENT_AD:
                    self._accept_notice(ad, held)
                else:
                    sheets.append(self._sheet(ad))
                self._refused.pop(str(ad.get("Name")), None)
            except BadPayload as problem:
                self._refuse(str(ad.get("Name")), str(problem))
        return sheets

    def _accept_notice(self, ad: Mapping[str, Any], held: frozenset[str]) -> None:
        notice = read_notice(payload_of(ad))
        check_signature(AGENT_AD, ad, notice.key)
        if notice.agent != notice.schedd:
            raise BadPayload(f"an agent called {notice.agent} speaks for {notice.schedd}")
        self._keys.check_notice(notice, notice.schedd in held)
        newest = self._newest.get(f"{notice.schedd} {notice.key}", 0)
        if notice.number < newest:
            raise BadPayload(f"notice {notice.number} is old: {newest} was heard already")
        self._newest[f"{notice.schedd} {notice.key}"] = notice.number
        heard_at = ad.get("LastHeardFrom")
        age_s = self._agents.clock.wall_s() - heard_at if isinstance(heard_at, int) else 0.0
        self._agents.record_notice(notice, age_s)

    def _sheet(self, ad: Mapping[str, Any]) -> OrderSheet:
        sheet = read_orders(payload_of(ad))
        known = self._keys.pin_of(sheet.agent)
        if known is None:
            raise BadPayload(f"no key of {sheet.agent} is known")
        check_signature(ORDERS_AD, ad, known.key)
        if (sheet.manager, sheet.manager_key) != (self._name, self._key):
            raise BadPayload(f"it is for {sheet.manager} with key {sheet.manager_key or '(none)'}")
        foreign = next((order.job for order in sheet.orders if order.run.schedd != sheet.agent), "")
        if foreign:
            raise BadPayload(f"{sheet.agent} gives orders about {foreign}, a job of another access point")
        return sheet

    def _refuse(self, ad: str, problem: str) -> None:
        if self._refused.get(ad) != problem:
            log.warn("message-refused", ad=ad, problem=problem)
            while len(self._refused) >= _REFUSALS_KEPT:
                del self._refused[next(iter(self._refused))]
            self._refused[ad] = problem

    def facts(self) -> dict[str, Any]:
        """Return keys and refusals, for people."""
        refused: Sequence[dict[str, str]] = [{"Ad": ad, "Problem": text} for ad, text in self._refused.items()]
        return {"AgentKeys": self._keys.facts(), "Refused": refused, "ManagerKey": self._key}
