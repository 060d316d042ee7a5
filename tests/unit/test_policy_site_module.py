"""A site's own policy: used, reloaded, and refused when it is bad, while the service goes on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from policy_site import ROOT_DIR, Service

from policy_service.operations import OPERATIONS
from policy_service.site_policy import PolicyError, SitePolicy, find_fault, open_policy, trial_cases
from stageout.tuning.policies import BUILT_IN, Grant, Limits
from tests.descriptors import many_open
from tests.polling import wait_for

HALF = """
    from stageout.tuning.policies import available

    def grant(asker, grants, limits):
        print("noise on standard output")
        return min(max(asker.streams, 2), asker.wanted, asker.streams + available(asker, grants, limits))
"""
PASSES_THE_TRIAL_THEN = """
    calls = 0
    def grant(asker, grants, limits):
        global calls
        calls += 1
        if limits.max_pair != 16:
            {}
        return 0
"""


def _write(path: Path, text: str) -> Path:
    path.write_text(dedent(text))
    return path


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    one = Service(tmp_path, POLICY=_write(tmp_path / "site.py", HALF))
    yield one
    one.close()


def _metric(service: Service, name: str) -> str:
    lines = service.ask("GET", "/metrics", owner="").text.splitlines()
    [line] = [line for line in lines if line.startswith(f"stageout_policy_{name} ")]
    return line.rsplit(" ", 1)[1]


def test_a_site_policy_decides(service: Service) -> None:
    assert service.start().lease("m")["streams"] == 2
    assert _metric(service, "policy_ok") == "1.0"


def test_a_changed_module_counts_after_reconfig_and_a_bad_one_is_refused(service: Service, tmp_path: Path) -> None:
    service.start()
    before = (tmp_path / "site.py").stat()
    changed = _write(tmp_path / "site.py", HALF.replace("2", "3"))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # in the same second, with the same size
    assert service.lease("before")["streams"] == 2
    service.signal(signal.SIGHUP)
    wait_for(lambda: " configuration-reloaded" in service.log.read_text(), "it is reloaded")
    assert service.lease("after")["streams"] == 3
    _write(tmp_path / "site.py", "def grant(asker, grants, limits): return 1 / 0")
    service.signal(signal.SIGHUP)
    wait_for(lambda: "ZeroDivisionError" in service.log.read_text(), "it is refused")
    wait_for(lambda: _metric(service, "reconfig_ok") == "0.0", "the refusal is shown")
    assert "ZeroDivisionError" in service.ask("GET", "/", owner="").text
    assert service.lease("later")["streams"] == 3
    assert _metric(service, "policy_ok") == "1.0"
    _write(tmp_path / "site.py", HALF)
    service.signal(signal.SIGHUP)
    wait_for(lambda: _metric(service, "reconfig_ok") == "1.0", "a good one is taken")
    assert service.lease("last")["streams"] == 2


def test_the_service_starts_with_the_greedy_policy_when_the_module_is_bad(service: Service, tmp_path: Path) -> None:
    _write(tmp_path / "site.py", "syntax error")
    assert service.start().lease("m")["streams"] == 4
    assert _metric(service, "policy_ok") == "0.0"
    assert "SyntaxError" in service.ask("GET", "/", owner="").text


@pytest.mark.parametrize("deed", ["while True: pass", "raise RuntimeError", "import os; os._exit(3)", "return 10**9"])
def test_a_module_that_goes_bad_later_is_put_out_of_use(service: Service, tmp_path: Path, deed: str) -> None:
    _write(tmp_path / "site.py", PASSES_THE_TRIAL_THEN.format(deed))
    service.start()
    assert service.lease("m")["streams"] == 4
    assert service.lease("n")["streams"] == 4
    assert _metric(service, "policy_ok") == "0.0"
    assert "out of use until the next reconfig" in service.ask("GET", "/", owner="").text
    assert service.stop() == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def grant(asker, grants, limits): return limits.max_client", "outside 0 to|only .* within max_pair"),
        ("def grant(asker, grants, limits): return -1", "outside 0 to"),
        ("def grant(asker, grants, limits): return 1.0", "not a whole number"),
        ("def grant(asker, grants, limits): return True", "not a whole number"),
        ("def grant(asker, grants, limits): return None", "not a whole number"),
        ("def grant(asker): return 0", "TypeError"),
        ("grant = 5", "no function grant"),
        ("x = 1", "no function grant"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "its process ended"),
        ("def grant(asker, grants, limits):\n    while True: pass", "no answer within"),
    ],
)
def test_a_bad_module_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        SitePolicy(_write(tmp_path / "site.py", text))


def test_the_process_of_a_module_leaves_nothing_behind(tmp_path: Path) -> None:
    policy = SitePolicy(_write(tmp_path / "site.py", HALF))
    policy.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(policy._child.pid, os.WNOHANG)


def test_a_missing_module_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="FileNotFoundError"):
        open_policy(str(tmp_path / "none.py"))
    with pytest.raises(PolicyError, match="fair-share"):
        open_policy("fairshare")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_our_own_policies_pass_the_trial(name: str) -> None:
    for asker, grants, limits in trial_cases():
        assert find_fault(asker, grants, limits, BUILT_IN[name](asker, grants, limits)) == ""


def test_what_counts_as_a_fault() -> None:
    limits, asker = Limits(4, 4, 10, 8), Grant("me", 4, 8)
    grants = [asker, Grant("they", 4, 8)]
    assert find_fault(asker, grants, limits, 6) == ""
    assert "only 6" in find_fault(asker, grants, limits, 7)
    crowded = [asker, Grant("they", 20, 8)]
    assert find_fault(asker, crowded, limits, 4) == ""
    assert "only 4" in find_fault(asker, crowded, limits, 5)


def test_settings_of_htcondor_and_its_reconfig(tmp_path: Path) -> None:
    """As below condor_master: the shipped fragment, HTCondor's parameters, SIGHUP."""
    fragment = ROOT_DIR / "condor_config.d" / "20-stageout-policy.conf"
    service = Service(tmp_path)
    knobs = {f"STAGEOUT_POLICY_{name}": value for name, value in service.knobs.items() if name != "DIR"}
    config = tmp_path / "condor_config"

    def configure(**more: str) -> None:
        lines = [f"include : {fragment}", f"SPOOL = {tmp_path}/spool", f"LOG = {tmp_path}"]
        config.write_text("\n".join(lines + [f"{name} = {value}" for name, value in {**knobs, **more}.items()]) + "\n")

    configure(**{"P1.STAGEOUT_POLICY_INITIAL": "7"})
    service.environment = {"CONDOR_CONFIG": str(config), **{name: "" for name in os.environ if "_CONDOR_" in name}}
    service.log = tmp_path / "P1StageoutPolicyLog"
    try:
        service.start(["-local-name", "P1", "-f"])
        assert service.lease("a")["streams"] == 7
        assert (tmp_path / "spool" / "stageout_policy" / "policy.sqlite").is_file()
        configure(STAGEOUT_POLICY_INITIAL="5")
        service.signal(signal.SIGHUP)
        wait_for(lambda: " configuration-reloaded" in service.log.read_text(), "it is reloaded")
        assert service.lease("b")["streams"] == 5
        configure(STAGEOUT_POLICY_INITIAL="-5")
        service.signal(signal.SIGHUP)
        wait_for(lambda: "must be at least 0" in service.log.read_text(), "it is refused")
        assert service.lease("c")["streams"] == 5
    finally:
        service.close()


def test_the_example_in_the_documentation_is_a_good_policy(tmp_path: Path) -> None:
    page = (ROOT_DIR / "docs/administrator/policy-service.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    policy = SitePolicy(_write(tmp_path / "site.py", example))
    limits = Limits(4, 4, 100, 50)
    for owner, streams in (("test", 8), ("cms", 50)):
        asker = Grant(f"{owner}/m", 0, 1000, owner)
        assert policy.decide(asker, [asker], limits) == streams
    policy.close()


def test_a_service_with_many_connections_hears_its_module(tmp_path: Path) -> None:
    with many_open():
        policy = SitePolicy(_write(tmp_path / "site.py", HALF))
        policy.close()


def test_every_policy_and_operation_is_in_the_documentation() -> None:
    text = (ROOT_DIR / "docs/administrator/policy-service.md").read_text()
    assert all(f"| `{name}` |" in text for name in BUILT_IN)
    paths = {one.path.replace("{lease}", "ID") for one in OPERATIONS}
    assert all(f"{path}`" in text for path in paths)
