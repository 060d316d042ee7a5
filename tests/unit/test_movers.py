"""Movers with real plugin processes, good and bad ones."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manager_site import PYTHON, ROOT, UID, Site, made

from stageout.core.children import MOVER_MARK
from stageout.core.errors import ErrorClass
from stageout.core.sockets import readable
from stageout.movers import launch, mover
from stageout.movers.mover import Mover, PluginCall, Stopped, end_leftovers, unique_names
from stageout.movers.plugins_table import Plugin, PluginsTable
from stageout.movers.results import PLUGINS_WORD, Answer, Delivered, Failure, SentFile
from tests.polling import wait_for


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        (found.base / "movers").mkdir()
        (found.base / "movers").chmod(0o711)
        (found.base / "held").mkdir()
        yield found


def batch(
    site: Site, *urls: str, plugin: Plugin | None = None, lifetime_s: float = 30, data: bytes = b"12345"
) -> PluginCall:
    files = []
    for position, url in enumerate(urls):
        path = site.base / "held" / str(position)
        path.write_bytes(data)
        os.chown(path, UID, UID if ROOT else -1)
        files.append(SentFile(path, url, url.rpartition("/")[2], len(data)))
    used = plugin or Plugin(site.plugin, ("copy",), 4)
    return PluginCall(site.base / "movers" / "1", used, UID, UID if ROOT else os.getegid(), tuple(files), lifetime_s)


def run(site: Site, *urls: str, **more: Any) -> list[Answer]:
    return Mover(batch(site, *urls, **more)).run()


def failure(answer: Answer) -> Failure:
    assert isinstance(answer, Failure), answer
    return answer


def test_files_are_delivered_as_the_job_s_user(site: Site) -> None:
    answers = run(site, "copy://h/ok/one", "copy://h/ok/two")
    assert answers == [Delivered("size", "md5:00")] * 2
    assert (site.base / "dest/one").read_bytes() == b"12345"
    (call,) = site.calls()
    assert (call["uid"], call["umask"]) == (UID, 0o077)
    assert call["cwd"] == str(site.base / "movers/1")
    assert call["sid"] == call["pid"] != os.getsid(0)
    assert call["nul"] == "/dev/null"
    assert not (site.base / "movers/1").exists()
    if ROOT:
        assert 0 not in call["groups"]


def test_a_batch_of_many_files_leaves_the_processor_to_small_ones(site: Site) -> None:
    run(site, *(f"copy://h/ok/{number}" for number in range(10)))
    run(site, *(f"copy://h/ok/{number}" for number in range(11)))
    few, many = site.calls()
    assert (few["nice"], many["nice"]) == (os.nice(0), min(19, os.nice(0) + 5))


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """All numbers that ``select.select`` takes are in use, as in a busy daemon."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
        while not taken or taken[-1] < 1024:
            taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_daemon_with_many_connections_runs_plugins(site: Site) -> None:
    with many_descriptors():
        assert run(site, "copy://h/ok/one") == [Delivered("size", "md5:00")]
        one, other = socket.socketpair()
        with one, other:
            other.send(b"x")
            assert readable([one.fileno(), other.fileno()], 30) == [one.fileno()]


def test_the_environment_is_small(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONDOR_INHERIT", "SECRET", "STAGEOUT_SPOOL", "_CONDOR_JOB_AD", "http_proxy", "STAGEOUT_CURL_KNOB"):
        monkeypatch.setenv(name, "x")
    run(site, "copy://h/ok/one")
    env = site.calls()[0]["env"]
    assert env["STAGEOUT_MOVER"] == "1"
    assert env[MOVER_MARK] == env["HOME"] == str(site.base / "movers/1")
    assert env["STAGEOUT_PLUGIN_LIFETIME_S"] == "30"
    assert env["http_proxy"] == env["STAGEOUT_CURL_KNOB"] == "x"
    assert not {"CONDOR_INHERIT", "SECRET", "STAGEOUT_SPOOL", "_CONDOR_JOB_AD"} & set(env)


@pytest.mark.parametrize(("several", "said"), [(True, "os.path.basename(name)"), (False, "name")])
def test_a_failure_names_the_file_as_its_job_did(site: Site, several: bool, said: str) -> None:
    """Two jobs of a batch have an output of that name; both are called otherwise meanwhile."""
    text = site.plugin.read_text()
    assert "quota exceeded for alice" in text
    site.write_script(
        "copy_plugin",
        text.replace("quota exceeded for alice", f'no room at 10.1.out for %s" % {said} + "'),
    )
    plugin = Plugin(site.plugin, ("copy",), 4, several=several)
    answers = run(site, "copy://h/refuse/out", "copy://g/refuse/out", plugin=plugin)
    assert [failure(one).message for one in answers] == ["no room at 10.1.out for out"] * 2


def test_plugins_of_other_makers_get_files_and_no_links(site: Site) -> None:
    """HTCondor's curl_plugin opens no symbolic link."""
    for several in (True, False):
        plugin = Plugin(site.plugin, ("copy",), 4, several=several)
        assert run(site, "copy://h/ok/one", "copy://h/ok/two", plugin=plugin) == [Delivered("size", "md5:00")] * 2
        (named,) = [call["requests"] for call in site.calls()][-1:]
        assert named.count(f'LocalFileName = "{site.base}/movers/') == (2 if several else 0)


def test_a_plugin_that_does_not_verify_is_believed_about_the_size(site: Site) -> None:
    assert run(site, "copy://h/plain/one") == [Delivered(PLUGINS_WORD)]
    assert failure(run(site, "copy://h/claim/one")[0]).kind is ErrorClass.SIZE_MISMATCH
    assert failure(run(site, "copy://h/unsaid/one")[0]).kind is ErrorClass.NOT_VERIFIED


def test_what_is_verified_counts_whatever_else_failed(site: Site) -> None:
    refused, verified, word = run(site, "copy://h/refuse/a", "copy://h/ok/b", "copy://h/plain/c")
    assert (failure(refused).kind, failure(refused).message) == (
        ErrorClass.PERMISSION_DENIED,
        "quota exceeded for alice",
    )
    assert verified == Delivered("size", "md5:00")
    assert failure(word).at_once
    assert "ended with status 1" in failure(word).message


def test_a_missing_ad_is_a_failure_of_that_file(site: Site) -> None:
    good, silent, more = run(site, "copy://h/ok/a", "copy://h/silent/b", "copy://h/ok/c")
    assert isinstance(good, Delivered)
    assert isinstance(more, Delivered)
    assert failure(silent).kind is ErrorClass.PLUGIN_BROKEN


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("nothing", "ended with status 0"), ("die", "killed by signal 9"), ("garbage", "ended with status 0"),
        ("secret", "ended with status 3"),
    ],
)  # fmt: skip
def test_plugins_that_break(site: Site, mode: str, words: str) -> None:
    (answer,) = run(site, f"copy://h/{mode}/a")
    assert failure(answer).kind is ErrorClass.PLUGIN_BROKEN
    assert words in failure(answer).message
    assert "token" not in failure(answer).message


def test_retry_after_of_a_foreign_plugin(site: Site) -> None:
    (answer,) = run(site, "copy://h/busy/a")
    assert failure(answer).kind.retryable
    assert failure(answer).retry_after_s == 3600


def test_a_plugin_that_hangs_is_ended_with_its_children(site: Site) -> None:
    for lifetime_s in (0.5, 5.0, 50.0):  # a slow machine takes its time to start it
        (answer,) = run(site, "copy://h/hang/a", lifetime_s=lifetime_s)
        assert failure(answer).kind is ErrorClass.DEADLINE
        if site.calls():
            break
    leader = site.calls()[0]["pid"]
    wait_for(lambda: not [pid for pid in _pids() if _group(pid) == leader and _is_alive(pid)])


def hiding(site: Site, ends: str) -> tuple[Plugin, Path]:
    """A plugin that leaves a process in a session of its own, without the environment by which it is known, with init
    for a parent; and the file with the number of that process. :param ends: how it ends.
    """
    hide = "setsid env -i /bin/sh -c 'sleep 600 & echo $! > pid.new; mv pid.new pid; wait' > /dev/null 2>&1 &"
    text = f"""#!/bin/sh
cd {site.base}/dest
({hide})
while [ ! -e pid ]; do sleep 0.01; done
{ends}
"""
    return Plugin(site.write_script("hiding_plugin", text), ("copy",), 4), site.base / "dest/pid"


@pytest.mark.parametrize("how", ["in time", "killed", "stopped"])
def test_what_a_plugin_has_started_ends_with_it_wherever_it_hides(site: Site, how: str) -> None:
    ends = {"in time": "", "killed": "kill -SEGV $$", "stopped": "sleep 600"}
    plugin, number = hiding(site, ends[how])
    mover = Mover(batch(site, "copy://h/ok/a", plugin=plugin, lifetime_s=300))
    if how == "stopped":
        threading.Thread(target=lambda: (wait_for(number.exists), mover.stop())).start()
        with pytest.raises(Stopped):
            mover.run()
    else:
        words = {"in time": "status 0", "killed": f"signal {signal.SIGSEGV.value}"}
        assert words[how] in failure(mover.run()[0]).message
    assert not _is_alive(int(number.read_text()))


def test_a_launcher_that_gets_no_time_to_run_leaves_nothing_either(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it was killed before it had killed its children, and nobody knew them any more."""
    monkeypatch.setattr(mover, "_END_S", 0.5)
    plugin, number = hiding(site, "echo $PPID > parent.new; mv parent.new parent; sleep 600")
    one, parent = Mover(batch(site, "copy://h/ok/a", plugin=plugin, lifetime_s=300)), site.base / "dest/parent"

    def halt_and_stop() -> None:
        wait_for(parent.exists)
        os.kill(int(parent.read_text()), signal.SIGSTOP)
        one.stop()

    threading.Thread(target=halt_and_stop).start()
    with pytest.raises(Stopped):
        one.run()
    wait_for(lambda: not _is_alive(int(number.read_text())))


def test_a_stop_between_fork_and_watch_is_the_plugin_s_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is held up behind its fork until the plugin has hidden a process, and gets its SIGTERM there."""
    plugin, number = hiding(site, "sleep 600")
    text = f"""
import os, runpy, time
fork = os.fork
def held_up():
    pid = fork()
    while pid and not os.path.exists({str(number)!r}):
        time.sleep(0.01)
    if pid:
        os.kill(os.getpid(), {signal.SIGTERM.value})
    return pid
os.fork = held_up
runpy.run_path({launch.__file__!r}, run_name="__main__")
"""
    monkeypatch.setattr(mover, "_LAUNCH", site.write_script("held_up.py", text))
    (answer,) = run(site, "copy://h/ok/a", plugin=plugin, lifetime_s=300)
    assert f"signal {signal.SIGTERM.value}" in failure(answer).message
    assert not _is_alive(int(number.read_text()))


def test_a_plugin_that_has_no_group_yet_is_ended_by_itself() -> None:
    with subprocess.Popen(["sleep", "600"]) as started:
        launch._kill_group(started.pid, signal.SIGTERM)
        assert started.wait() == -signal.SIGTERM


def test_what_has_no_child_here_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in a /proc of another namespace are those of other processes."""
    other = os.getppid()
    monkeypatch.setattr(os, "getpid", lambda: other)
    assert launch._children() == []


def test_what_cannot_be_ended_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the disk, or is another user's: nobody heard of it."""
    note, written = os.pipe()
    monkeypatch.setattr(os, "waitpid", lambda *which: (0, 0))
    monkeypatch.setattr(os, "kill", lambda *which: None)
    monkeypatch.setattr(launch, "_REST_S", 0.0)
    monkeypatch.setattr(launch, "_children", lambda: [os.getpid()])
    launch._end_rest(written)
    number, _, state = os.read(note, 100).decode().partition(":")
    assert (number, len(state)) == (str(os.getpid()), 1)
    os.close(note)
    os.close(written)


def test_what_outlives_a_plugin_is_in_the_log(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(launch.__file__).read_text()
    assert text.count("_end_rest(note)\n") == 1
    limited = site.write_script("launch.py", text.replace("_end_rest(note)\n", "os.write(note, b'4711:D')\n"))
    monkeypatch.setattr(mover, "_LAUNCH", limited)
    said = list[tuple[str, object]]()
    monkeypatch.setattr(mover.log, "error", lambda event, **facts: said.append((event, facts["pids"])))
    assert run(site, "copy://h/ok/a") == [Delivered("size", "md5:00")]
    assert said == [("plugin-kill-failed", "4711:D")]


def test_a_plugin_is_ended_by_the_signals_that_end_every_program(site: Site) -> None:
    """Python, which starts it, ignores some: a plugin that writes into a pipe nobody reads went on for ever."""
    text = f"#!/bin/sh\ncat /proc/self/status > {site.base}/dest/status\n"
    run(site, "copy://h/ok/a", plugin=Plugin(site.write_script("ignoring_plugin", text), ("copy",), 4))
    status = dict(line.split(":", 1) for line in (site.base / "dest/status").read_text().splitlines())
    assert not [one for one in (signal.SIGPIPE, signal.SIGXFSZ) if int(status["SigIgn"], 16) & 1 << one - 1]
    assert int(status["SigBlk"], 16) == 0, "what its parent blocks while it starts"


def test_a_mover_can_be_stopped(site: Site) -> None:
    mover = Mover(batch(site, "copy://h/hang/a"))
    seen: list[BaseException] = []

    def work() -> None:
        try:
            mover.run()
        except Stopped as stopped:
            seen.append(stopped)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: site.calls())
    mover.stop()
    thread.join(60)
    assert len(seen) == 1
    assert not (site.base / "movers/1").exists()


def test_a_plugin_that_cannot_be_started(site: Site) -> None:
    (answer,) = run(site, "copy://h/ok/a", plugin=Plugin(site.base / "gone_plugin", ("copy",), 4))
    assert failure(answer).kind is ErrorClass.PLUGIN_BROKEN
    assert "status 126" in failure(answer).message


def test_protocol_1_is_one_call_per_file(site: Site) -> None:
    text = f"""#!/bin/sh
case "$2" in
*/bad) echo 'TransferError = "no such place"'; exit 1 ;;
*/short) echo 'TransferFileBytes = 4' ;;
esac
cp "$1" {site.base}/dest/"${{2##*/}}"
"""
    old = Plugin(site.write_script("old_plugin", text), ("copy",), 1)
    good, bad, short = run(site, "copy://h/good", "copy://h/bad", "copy://h/short", plugin=old)
    assert good == Delivered(PLUGINS_WORD)
    assert (site.base / "dest/good").read_bytes() == b"12345"
    assert failure(bad).message == "no such place"
    assert failure(short).kind is ErrorClass.SIZE_MISMATCH


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("writes", ['printf abc > "$place"', ":"])
def test_a_file_is_fetched(site: Site, protocol: int, writes: str) -> None:
    said = 'TransferSuccess=true;TransferFileName="f";TransferFileBytes=3'
    begins = {1: 'place="$2"', 2: f'test $# = 4 || exit 9; place="$HOME/f"; echo \'[{said}]\' > "$4"'}
    script = site.write_script("fetching_plugin", f"#!/bin/sh\n{begins[protocol]}\n{writes}\n")
    target = site.base / "movers/fetched"
    one = batch(site, plugin=Plugin(script, ("copy",), protocol))
    cargo = SentFile(target, "copy://h/f", "f", 0)
    (answer,) = Mover(replace(one, files=(cargo,), fetches=True)).run()
    if writes == ":":
        assert failure(answer).kind in (ErrorClass.PLUGIN_BROKEN, ErrorClass.SIZE_MISMATCH)
        assert not target.exists()
    else:
        assert answer == Delivered(PLUGINS_WORD)
        assert target.read_bytes() == b"abc"


def test_odd_names_do_not_meet(site: Site) -> None:
    assert all(len(os.fsencode(name)) < 240 for name in unique_names(["あ" * 85, "あ" * 300, "\udcff" * 250]))
    names = unique_names(["out", "d/out", "", ".copy_plugin.in", "x" * 300, "1.out"])
    assert len(set(names)) == 6
    assert all(name and "/" not in name and not name.startswith(".") for name in names)
    answers = run(site, "copy://a/ok/out", "copy://b/ok/out")
    assert answers == [Delivered("size", "md5:00")] * 2


@pytest.mark.skipif(not ROOT, reason="needs root: a user who is not the manager's")
def test_only_a_plain_file_of_the_user_s_own_is_read_as_results(site: Site) -> None:
    secret = site.base / "secret"
    secret.write_text('[TransferSuccess=false; TransferFileName="a"; TransferError="root only"]')
    secret.chmod(0o600)
    text = f'#!/bin/sh\nrm "$4"\nln -s {secret} "$4"\nexit 1\n'
    (answer,) = run(site, "copy://h/ok/a", plugin=Plugin(site.write_script("evil_plugin", text), ("copy",), 4))
    assert "root only" not in failure(answer).message


def test_what_an_earlier_manager_left_is_ended(site: Site) -> None:
    mover = Mover(batch(site, "copy://h/hang/a"))

    def work() -> None:
        with contextlib.suppress(Stopped):
            mover.run()

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: site.calls())
    assert end_leftovers(site.base / "movers") >= 1
    assert list((site.base / "movers").iterdir()) == []
    mover.stop()
    thread.join(60)


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_is_made_as_htcondor_makes_it(site: Site) -> None:
    later = site.write_plugin(
        "later_plugin", "other, Third", protocol=2, more="StageOutVerifies = true\\nStageOutBatchFiles = 500"
    )
    broken = site.write_script("broken_plugin", "#!/bin/sh\necho oops\n")
    old = site.write_script("old_plugin", "#!/bin/sh\necho 'SupportedMethods = \"old\"'\n")
    table = PluginsTable()
    table.load([str(path) for path in (site.plugin, later, broken, old, site.base / "missing_plugin")])

    def path(scheme: str, first: str = "/not/registered") -> Path | None:
        found = table.find(first, scheme)
        return found.path if found else None

    assert path("copy") == site.plugin
    assert path("other") == path("cred+OTHER") == later
    assert path("other", str(site.plugin)) == site.plugin
    assert path("third", str(site.plugin)) == later
    assert path("fourth") is None
    assert [table.batch_files("/not/registered", scheme) for scheme in ("copy", "third", "fourth")] == [0, 500, 0]
    assert {plugin.path.name: (plugin.protocol, plugin.verifies) for plugin in table.plugins} == {
        "copy_plugin": (4, False), "later_plugin": (2, True), "old_plugin": (1, False),
    }  # fmt: skip
    assert table.registered(str(broken)) is None


def test_a_changed_plugin_is_asked_again(site: Site) -> None:
    table = PluginsTable()
    table.load([str(site.plugin)])
    assert table.find("", "new") is None
    site.write_plugin("copy_plugin", "copy,new")
    table.load([str(site.plugin)])
    assert table.find("", "new") is not None


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_alive(pid: int) -> bool:
    """Not merely a dead process that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


_ENDLESS = """#!{} -I
import sys
out = sys.argv[sys.argv.index("-outfile") + 1]
ad = '[ TransferSuccess = true; TransferUrl = "copy://h/{}"; TransferFileBytes = 5; TransferFileName = "{}" ]'
with open(out, "w") as stream:
    stream.write(ad.format("a", "a"))
    stream.write(ad.format("x", "x") * (60_000_000 // len(ad)))
    stream.write(ad.format("b", "b"))
"""


def test_results_without_end_cost_what_was_asked_for(site: Site) -> None:
    plugin = site.write_script("endless_plugin", _ENDLESS.replace("{}", PYTHON, 1))
    before_s, before_kb = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first, last = run(site, "copy://h/a", "copy://h/b", plugin=Plugin(plugin, ("copy",), 2), lifetime_s=120)
    took_s, more_kb = time.process_time() - before_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    print(f"{took_s:.2f} s of processor time, {more_kb // 1024} MB")
    assert first == Delivered(PLUGINS_WORD)
    assert "wrote no result" in failure(last).message
    assert took_s < 5
    assert more_kb < 64 * 1024
