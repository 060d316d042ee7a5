"""The doctor's questions to others: the routers that a router connects to, and the collector's clock."""

from __future__ import annotations

import pytest

from stageout.cli.doctor import pool, report
from stageout.cli.doctor.findings import Level
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.wire.messages import CLOCKS_APART
from tests.unit.doctor_machine import Fake
from tests.unit.test_cli_doctor import alone_with


@pytest.mark.parametrize(
    ("answer", "level", "text", "remedy"),
    [(0.0, Level.OK, "gw:9621 takes the key in /own", ""), (-90.0, Level.WARN, "the clock of gw:9621 is -90 s", "NTP"),
     (TransferFailure(ErrorClass.CREDENTIAL_REFUSED, "another secret"), Level.FAIL, "another secret", "keys file"),
     (TransferFailure(ErrorClass.CONNECT_FAILED, "refused"), Level.FAIL, "gw:9621: refused", "waits here"),
     (TransferFailure(ErrorClass.PERMISSION_DENIED, f"{CLOCKS_APART} (here it is"), Level.FAIL, "gw:9621: the", "NTP")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["NEIGHBOURS", "TERMINALS", "EGRESS_LEASES"])
def test_the_routers_that_a_router_needs_are_asked(
    name: str, answer: object, level: Level, text: str, remedy: str
) -> None:
    def change(machine: Fake) -> None:
        machine.others = answer

    found = alone_with(change, KEY="/own", **{name: "gw:9621"})["router-others"]
    assert (found[0], text in found[1], remedy in found[2]) == (level, True, True), found
    assert "no router" in alone_with(change, KEY="/own")["router-others"][1]
    assert alone_with(change, NEIGHBOURS="gw:port")["router-others"][0] is Level.FAIL


def test_the_keys_behind_a_terminal_are_taken_for_no_routers() -> None:
    asked: list[str] = []

    def change(machine: Fake) -> None:
        machine.greet = lambda host, port, key: asked.append(f"{host}:{port}") or 0.0  # type: ignore[method-assign,func-returns-value]

    alone_with(
        change, TERMINALS="gw:9621=alice,pilots other", NEIGHBOURS="collector, gw:9621, far:1", EGRESS_LEASES="far:1"
    )
    assert sorted(asked) == ["far:1", "gw:9621", "other:9621"]


def test_a_collector_that_has_no_ad_of_its_own_is_not_asked_for_its_time() -> None:
    machine = Fake()
    machine.in_collector["Collector"] = []
    (found,) = report.run_checks([pool.clock], machine)
    assert found.level is Level.UNCHECKED and "ad of its own" in found.text
