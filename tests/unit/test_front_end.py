"""Front ends of third-party plugins: what HTCondor sees of them, and what the plugin behind them sees."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.delivery.front_ends import FrontEnds
from stageout.cli.main import main
from stageout.core import front_end
from stageout.movers.plugins_table import PluginsTable
from stageout.testing.conformance import check, failures, table
from stageout.testing.endpoints import Endpoint, HttpEndpoint
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted, query, run_query
from tests.polling import wait_for
from tests.unit.test_plugin_handing_over import CLIENT

ROOT = Path(__file__).resolve().parents[2]
PELICAN = ROOT / "tests" / "pelican_plugin"

#: Says what it was called with in the file ``seen``, and what it is told to in the URL: a status, a signal, or a wait.
STOCK = f"""#!{sys.executable}
import json, os, re, signal, sys, time
arguments = sys.argv[1:]
here = os.path.dirname(os.path.realpath(__file__))
if arguments == ["-classad"]:
    open(here + "/asked", "a").write(".")
    print('MultipleFileSupport = true\\nProtocolVersion = 2\\nPluginType = "FileTransfer"')
    print('SupportedMethods = "box"\\nPluginVersion = "3"')
    if os.environ.get("http_proxy") and "proxied" in os.listdir(here):
        print('box_proxy = "%s"' % os.environ["http_proxy"])
    sys.exit(0)
text = open(arguments[arguments.index("-infile") + 1]).read() if "-infile" in arguments else ""
out = arguments[arguments.index("-outfile") + 1] if "-outfile" in arguments else ""
ignored = [name for name in ("SIGPIPE", "SIGXFSZ") if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
status = [line for line in open("/proc/self/status") if line.startswith("SigIgn")][0].split()[1]
json.dump({{"name": sys.argv[0], "arguments": arguments, "pid": os.getpid(), "ppid": os.getppid(), "text": text,
           "environment": {{k: v for k, v in os.environ.items() if k not in "LC_CTYPE _ SHLVL PWD OLDPWD".split()}},
           "raw": open("/proc/self/environ").read().count("LC_CTYPE="),
           "descriptors": sorted(os.listdir("/proc/self/fd")), "ignored": int(status, 16),
           "out": open(out).read() if out and os.path.exists(out) else None}}, open(here + "/seen", "w"))
def told(word):
    return re.search(word + "([0-9]+)", text + " ".join(arguments))
if told("wait"):
    time.sleep(60)
if told("signal"):
    os.kill(os.getpid(), int(told("signal")[1]))
if out:
    open(out, "w").write('[ TransferSuccess = true; TransferUrl = "box://h/x"; TransferFileName = "f0" ]')
sys.exit(int(told("status")[1]) if told("status") else 0)
"""


class Bench:
    """A plugin, its front end, a scratch directory and an environment."""

    def __init__(self, folder: Path) -> None:
        self.plugin = folder / "stock" / "box_plugin.py"
        self.front_end = folder / "front" / "box_plugin.py"
        self.scratch = folder / "scratch"
        for place in (self.plugin.parent, self.scratch):
            place.mkdir()
        self.write()
        self.environment = {"PATH": os.defpath}
        self.credentials: Path | None = None

    def write(self, text: str = STOCK) -> None:
        """Put the plugin there, as an upgrade does: another file under its name, as old as the first."""
        aside = self.plugin.with_suffix(".new")
        aside.write_text(text)
        aside.chmod(0o755)
        os.utime(aside, (1_700_000_000, 1_700_000_000))
        aside.rename(self.plugin)

    def wrap(self) -> None:
        assert main(["wrap", "--directory", str(self.front_end.parent), str(self.plugin)]) == 0

    def asked(self) -> int:
        """How often the plugin was asked what it can."""
        return len((self.plugin.parent / "asked").read_text())

    @property
    def seen(self) -> dict[str, Any]:
        return json.loads((self.plugin.parent / "seen").read_text())  # type: ignore[no-any-return]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self.front_end, *arguments], cwd=self.scratch, env=self.environment, capture_output=True, check=False
        )

    def upload(self, *urls: str) -> PluginRun:
        for index, _ in enumerate(urls):
            (self.scratch / f"f{index}").write_bytes(b"12345")
        starter = EmbeddedStarter(
            self.scratch, PluginTable([self.front_end], self.environment), {"ProjectName": "LIGO", "Owner": "u"}, {},
            self.credentials, self.environment, {}, 60.0,
        )  # fmt: skip
        (run,) = starter.upload([Wanted(url, f"f{index}") for index, url in enumerate(urls)])
        return run


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    own = os.geteuid(), os.getegid()  # nobody else may read the directories of tests
    monkeypatch.setattr("stageout.movers.plugins_table._unprivileged", lambda: own)
    return Bench(tmp_path)


@pytest.fixture
def client(bench: Bench, tmp_path: Path) -> Iterator[Any]:
    """A sandbox manager that says what the file ``answer`` says, in the place of the hand-off's client."""
    bench.wrap()
    site = tmp_path / "site"
    site.mkdir()
    (site / "program.py").write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n{CLIENT}\n"
        "sys.argv = [sys.argv[0], *sys.argv[1:]]\nrunpy.run_module('stageout.plugin.front_end', run_name='__main__')\n"
    )
    text = bench.front_end.read_text()
    program = front_end._PROGRAM
    bench.front_end.write_text(text.replace(f"program={program}\n", f"program={site / 'program.py'}\n"))
    bench.environment.update(OFFERS=str(tmp_path / "offers"), ANSWER="yes")
    return lambda: [json.loads(line) for line in (tmp_path / "offers").read_text().splitlines()]


# ---- -classad --------------------------------------------------------------------------------------------------------


def test_the_answer_is_the_plugins_own_and_it_is_not_asked_again(bench: Bench) -> None:
    bench.wrap()
    asked = bench.asked()
    assert run_query(bench.front_end, bench.environment) == run_query(bench.plugin, bench.environment)
    assert bench.asked() == asked + 1
    assert query(bench.front_end).text("PluginVersion") == "3"
    assert bench.asked() == asked + 1


def test_a_plugin_that_changes_is_asked_at_once_and_its_front_end_is_renewed(bench: Bench) -> None:
    bench.wrap()
    kept, paths = FrontEnds(), [str(bench.front_end), str(bench.plugin), "/nowhere/x_plugin"]
    kept.renew(paths)
    before = bench.asked()
    bench.write(STOCK.replace('PluginVersion = "3"', 'PluginVersion = "4"'))  # of the same size and age
    assert query(bench.front_end).text("PluginVersion") == "4"
    assert bench.asked() == before + 1
    for _ in range(3):
        kept.renew(paths)
    assert bench.asked() == before + 2
    assert query(bench.front_end).text("PluginVersion") == "4"
    assert bench.asked() == before + 2
    assert bench.front_end.stat().st_mode & 0o777 == 0o755


def test_an_answer_that_depends_on_more_than_the_file_is_asked_for_again_on_request(bench: Bench) -> None:
    bench.wrap()
    kept = FrontEnds()
    kept.renew([str(bench.front_end)])
    inode = bench.front_end.stat().st_ino
    before = bench.asked()
    kept.renew([str(bench.front_end)])
    assert bench.asked() == before
    kept.forget()
    kept.renew([str(bench.front_end)])
    assert bench.asked() == before + 1
    assert bench.front_end.stat().st_ino == inode  # the answer is the same: nothing was written


def test_proxies_that_a_plugin_tells_are_those_of_the_job_that_asks(bench: Bench) -> None:
    (bench.plugin.parent / "proxied").touch()
    bench.wrap()
    before = bench.asked()
    assert "box_proxy" not in query(bench.front_end, bench.environment)
    assert bench.asked() == before
    bench.environment["http_proxy"] = "http://squid:3128"
    assert query(bench.front_end, bench.environment).text("box_proxy") == "http://squid:3128"
    assert "squid" not in bench.front_end.read_text()


def test_a_plugin_that_tells_no_proxies_is_not_asked_for_them(bench: Bench) -> None:
    bench.wrap()
    before = bench.asked()
    bench.environment["http_proxy"] = "http://squid:3128"
    query(bench.front_end, bench.environment)
    assert bench.asked() == before


def test_an_answer_cannot_run_anything(bench: Bench, tmp_path: Path) -> None:
    text = f"print('SupportedMethods = \"box\"\\nX = \"a\\'$(touch {tmp_path}/bad)`id`\\'%s\"')"
    bench.write(f"#!{sys.executable}\n{text}\n")
    bench.wrap()
    assert run_query(bench.front_end) == run_query(bench.plugin)
    assert not (tmp_path / "bad").exists()


def test_a_front_end_whose_library_is_gone_is_the_plugin(bench: Bench) -> None:
    bench.wrap()
    text = bench.front_end.read_text()
    bench.front_end.write_text(text.replace(f"program={front_end._PROGRAM}", "program=/nowhere/front_end.py"))
    assert bench.call("-infile", os.devnull, "-outfile", str(bench.scratch / "out"), "-upload").returncode == 0
    assert bench.seen["arguments"][-1] == "-upload"


def test_a_front_end_whose_library_is_damaged_is_the_plugin(bench: Bench, tmp_path: Path) -> None:
    bench.wrap()
    program = tmp_path / "front_end.py"
    program.write_text(front_end._PROGRAM.read_text().replace("stageout.plugin.foreign", "stageout.plugin.nowhere"))
    text = bench.front_end.read_text()
    bench.front_end.write_text(text.replace(f"program={front_end._PROGRAM}", f"program={program}"))
    done = bench.call("-infile", os.devnull, "-outfile", str(bench.scratch / "out"), "-upload")
    assert done.returncode == 0 and b"no hand-off: ModuleNotFoundError" in done.stderr
    assert bench.seen["arguments"][-1] == "-upload"


def test_the_sandbox_managers_table_has_it_as_the_plugin(bench: Bench) -> None:
    bench.wrap()
    plugins = PluginsTable(asks_as_itself=True)
    plugins.load([str(bench.front_end)])
    found = plugins.find(str(bench.front_end), "box")
    assert found is not None
    assert (found.path, found.methods, found.protocol, found.verifies) == (bench.front_end, ("box",), 2, False)


# ---- what the plugin sees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["-infile", "in with blank", "-outfile", "out"],
        ["-outfile", "out", "-infile", "in with blank", "-upload"],
        ["box://h/a b", "local"],
        ["local", "box://h/status7"],
        ["-help"],
        [],
        ["-from", "box://h/", "-delete", "x$y'z\"", "-jobad", "j"],
    ],
)
def test_the_plugin_gets_the_same_arguments(bench: Bench, arguments: list[str]) -> None:
    bench.wrap()
    (bench.scratch / "in with blank").write_text('[ Url = "box://h/status5"; LocalFileName = "/nowhere" ]')
    done = bench.call(*arguments)
    directly = subprocess.run([bench.plugin, *arguments], cwd=bench.scratch, env=bench.environment, check=False)
    assert done.returncode == directly.returncode
    assert bench.seen["arguments"] == arguments
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("upload", [[], ["-upload"]])
def test_the_plugin_is_the_process_that_was_started(bench: Bench, upload: list[str]) -> None:
    bench.wrap()
    (bench.scratch / "f0").write_text("5")
    (bench.scratch / "in").write_text(f'[ Url = "box://h/wait1"; LocalFileName = "{bench.scratch}/f0" ]')
    (bench.scratch / "out").write_text(" " * 19264)
    arguments = ["-infile", str(bench.scratch / "in"), "-outfile", str(bench.scratch / "out"), *upload]
    process = subprocess.Popen([bench.front_end, *arguments], cwd=bench.scratch, env=bench.environment)
    path = bench.plugin.parent / "seen"
    wait_for(lambda: process.poll() is not None or (path.exists() and path.read_text().endswith("}")), "the plugin")
    assert process.poll() is None
    seen = bench.seen
    assert (seen["pid"], seen["ppid"]) == (process.pid, os.getpid())
    assert seen["name"] == str(bench.plugin)
    assert seen["out"] == " " * 19264
    assert seen["environment"] == bench.environment
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    plain = subprocess.Popen([bench.plugin, "-upload"], cwd=bench.scratch, env=bench.environment)
    assert plain.wait(60) == 0
    assert bench.seen["ignored"] == seen["ignored"]
    assert bench.seen["raw"] == seen["raw"]
    assert bench.seen["descriptors"] == seen["descriptors"]


@pytest.mark.parametrize(("url", "status"), [("status11", 11), ("status1", 1), ("signal9", -9), ("signal11", -11)])
def test_the_plugins_end_is_the_front_ends(bench: Bench, url: str, status: int) -> None:
    bench.wrap()
    (bench.scratch / "f0").write_text("5")
    (bench.scratch / "in").write_text(f'[ Url = "box://h/{url}"; LocalFileName = "{bench.scratch}/f0" ]')
    arguments = ["-infile", str(bench.scratch / "in"), "-outfile", str(bench.scratch / "out"), "-upload"]
    assert bench.call(*arguments).returncode == status


def test_the_managers_own_transfer_goes_straight_to_the_plugin(bench: Bench, client: Any, tmp_path: Path) -> None:
    bench.environment["STAGEOUT_MOVER"] = "1"
    assert bench.upload("box://h/x").succeeded
    assert not (tmp_path / "offers").exists()
    assert bench.seen["arguments"][-1] == "-upload"


# ---- the hand-off ----------------------------------------------------------------------------------------------------


def test_uploads_are_handed_off(bench: Bench, client: Any) -> None:
    run = bench.upload("box://h/a b#1", "handle+box://h/y")
    assert run.succeeded
    assert not (bench.plugin.parent / "seen").exists()
    files = [str(bench.scratch / f"f{index}") for index in (0, 1)]
    assert client() == [[[["box://h/a b#1", files[0]], ["handle+box://h/y", files[1]]], str(bench.front_end)]]
    assert [ad["TransferProtocol"] for ad in run.ads] == ["stageout", "stageout"]
    assert [ad["TransferTotalBytes"] for ad in run.ads] == [5, 5]
    assert run.ads[0]["DeveloperData"]["StageOutReceipt"]["Ticket"] == "ab12"


def test_everything_that_came_with_the_job_goes_along(bench: Bench, client: Any, tmp_path: Path) -> None:
    bench.credentials = tmp_path / "creds"
    bench.credentials.mkdir()
    for name in ("box_handle", "scitokens"):
        (bench.credentials / f"{name}.use").write_text(f"secret of {name}")
    (tmp_path / "proxy").write_text("certificate")
    bench.environment["X509_USER_PROXY"] = str(tmp_path / "proxy")
    assert bench.upload("handle+box://h/y").succeeded
    names, contents, job_ad, _ = json.loads((tmp_path / "offers.carried").read_text())
    assert [name for name, _ in names] == ["box_handle.use", "scitokens.use", "x509_proxy"]
    assert contents == ["secret of box_handle", "secret of scitokens", "certificate"]
    assert "LIGO" in job_ad and "Owner" not in job_ad


@pytest.mark.parametrize(
    ("answer", "printed"), [("no agent seen", ""), ("raise", "no hand-off: OSError: broken || pipe")]
)
def test_a_refused_hand_off_leaves_all_to_the_plugin(bench: Bench, client: Any, answer: str, printed: str) -> None:
    bench.environment["ANSWER"] = answer
    run = bench.upload("box://h/x")
    assert run.succeeded and run.printed.partition(": ")[2].strip() == printed
    assert len(client()) == 1
    assert [ad["TransferUrl"] for ad in run.ads] == ["box://h/x"]
    assert bench.seen["out"] == " " * 19264


def test_variables_of_the_job_for_the_plugin_keep_its_uploads_synchronous(
    bench: Bench, client: Any, tmp_path: Path
) -> None:
    for name in ("BOX_RETRIES", "box_x"):
        bench.environment[name] = "3"
        assert bench.upload("box://h/x").succeeded
        assert bench.seen["environment"][name] == "3"
        del bench.environment[name]
    bench.environment["PELICAN_X"] = "3"
    assert not (tmp_path / "offers").exists()
    assert bench.upload("box://h/x").succeeded
    assert len(client()) == 1


def test_a_file_that_cannot_be_sent_is_the_plugins_to_report(bench: Bench, client: Any, tmp_path: Path) -> None:
    (bench.scratch / "in").write_text('[ Url = "box://h/x"; LocalFileName = "/nowhere/f0" ]')
    arguments = ["-infile", str(bench.scratch / "in"), "-outfile", str(bench.scratch / "out"), "-upload"]
    assert bench.call(*arguments).returncode == 0
    assert not (tmp_path / "offers").exists()
    assert "/nowhere/f0" in bench.seen["text"]


def test_a_plugin_of_protocol_1(bench: Bench, client: Any) -> None:
    (bench.scratch / "f0").write_bytes(b"12345")
    done = bench.call(str(bench.scratch / "f0"), "box://h/x")
    assert done.returncode == 0
    assert b'TransferProtocol = "stageout"' in done.stdout
    assert client()[0][0] == [["box://h/x", str(bench.scratch / "f0")]]
    assert bench.call("box://h/x", str(bench.scratch / "f1")).returncode == 0
    assert bench.seen["arguments"] == ["box://h/x", str(bench.scratch / "f1")]


# ---- stageout wrap ---------------------------------------------------------------------------------------------------


def test_the_line_of_configuration(bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("stageout.cli.wrap._listed", lambda: ["/a/curl_plugin", str(bench.plugin), "/b/x_plugin"])
    bench.wrap()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"FILETRANSFER_PLUGINS = /a/curl_plugin, {bench.front_end}, /b/x_plugin"
    bench.wrap()


def test_what_cannot_be_wrapped(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(plugin: object, directory: Path = bench.front_end.parent) -> str:
        assert main(["wrap", "--directory", str(directory), str(plugin)]) == 1
        return capsys.readouterr().err

    bench.wrap()
    assert "hands off by itself" in refusal(bench.front_end, tmp_path / "other")
    assert "hands off by itself" in refusal(ROOT / "plugins" / "stageout_curl_plugin")
    assert "is there, for something else" in refusal(bench.plugin, bench.plugin.parent)
    assert "from / on" in refusal("box_plugin.py")
    assert "No such file" in refusal("/nowhere/x_plugin")
    other = tmp_path / "box_plugin.py"
    other.write_text(STOCK)
    other.chmod(0o755)
    assert f"is there, for {bench.plugin}" in refusal(other)
    other.write_text("#!/bin/sh\nexit 1\n")
    assert "names no SupportedMethods" in refusal(other, tmp_path / "third")


# ---- a whole plugin --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Endpoint]:
    place = tmp_path / "place"
    place.mkdir()
    with contextlib.closing(HttpEndpoint(place)) as server:
        yield Endpoint(server.url_base.replace("http", "pelican"), place)


def test_a_front_end_keeps_each_rule_that_its_plugin_keeps(tmp_path: Path, store: Endpoint) -> None:
    """No manager is there: whatever the rules look at goes through to the plugin."""
    target = tmp_path / "front" / "pelican_plugin"
    assert main(["wrap", "--directory", str(target.parent), str(PELICAN)]) == 0
    rules = [
        "query-answers", "query-clean", "query-methods", "query-startd-attrs", "download-works", "one-ad-per-file",
        "failure-status", "unknown-scheme", "upload-works", "upload-ads", "upload-again", "upload-missing",
    ]  # fmt: skip
    bare, through = (
        {item.rule: (item.outcome, item.detail) for item in check(plugin, store, only=rules)}
        for plugin in (PELICAN, target)
    )
    assert {name: outcome for name, (outcome, _) in through.items()} == {
        name: outcome for name, (outcome, _) in bare.items()
    }
    assert not failures(check(target, store, only=["query-quick", "upload-works", "download-works"])), table
