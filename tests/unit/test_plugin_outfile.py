"""The output file survives full disks and sudden death."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageout.core.classad_parser import parse_ad
from stageout.core.classads import unparse_ad
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome, Request
from stageout.plugin.outfile import PAGE_BYTES, OutFile, roomy_slots, tight_slots
from stageout.plugin.requests import Item
from stageout.plugin.results import AdWriter, Record, fitted, least_bytes
from stageout.plugin.text import Scrubber, recordable
from stageout.testing.starter import PREALLOCATED_BYTES, PluginTable, installed, read_results

SCRIPTED = Path(__file__).resolve().parents[1] / "scripted_plugin"
lengths = st.lists(st.integers(50, 9000), min_size=1, max_size=60)


def overlap(slots):
    ends = [slot.offset + slot.width for slot in slots]
    return any(slot.offset < end for slot, end in zip(slots[1:], ends))


@given(lengths)
def test_slots_have_room_and_do_not_cross_pages(ad_bytes):
    slots, end = roomy_slots(ad_bytes)
    assert not overlap(slots)
    assert end == slots[-1].offset + slots[-1].width
    for slot, length in zip(slots, ad_bytes):
        assert slot.width >= length + 512
        if slot.width <= PAGE_BYTES:
            assert slot.offset // PAGE_BYTES == (slot.offset + slot.width - 1) // PAGE_BYTES


@given(lengths, st.integers(0, 60_000))
def test_tight_slots_use_what_is_there(least, size):
    slots = tight_slots(least, size)
    assert not overlap(slots)
    assert all(slot.width > length for slot, length in zip(slots, least))
    if slots:
        assert slots[-1].offset + slots[-1].width <= size
    if len(slots) < len(least):
        assert sum(length + 1 for length in least[: len(slots) + 1]) > size


def record(name="f", url="script://h/p", result=None, attempts=()):
    item = Item(Request(url, f"/scratch/{name}"), f"/scratch/{name}", "script", url)
    return Record(item, result, list(attempts), start_s=1.5, end_s=2.5)


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=700)


@settings(deadline=None)
@given(texts, texts.filter(bool), st.integers(0, 12), st.integers(0, 3000))
def test_any_result_fits_a_slot_made_for_its_promise(message, name, attempts, extra):
    writer = AdWriter(True, "1", Scrubber())
    writer.facts["StageOutSynchronous"] = message[:500]
    failure = TransferFailure(ErrorClass.CREDENTIAL_REFUSED, message, developer={"Fact": message})
    promise = writer.ad(record(name))
    width = least_bytes(promise) + extra
    for result in (failure, Outcome(2**60, 2**61, developer={"Fact": message})):
        text = fitted(writer.ad(record(name, result=result, attempts=[failure] * attempts)), width)
        ad = parse_ad(text)
        assert len(text) <= width
        assert ad["TransferSuccess"] is isinstance(result, Outcome)
        assert ad["TransferFileName"] == recordable(f"/scratch/{name}")
        assert ad["TransferUrl"] == "script://h/p"
        assert bool(ad.text("TransferError")) is (result is failure)
    with pytest.raises(ValueError, match="no room"):
        fitted(promise, 40)


def test_six_attempts_fit_the_slot_of_a_file_with_long_names_and_long_messages():
    writer = AdWriter(True, "1", Scrubber())
    writer.facts["TransferLocalMachineName"] = "node123.cluster.example.org"
    name, url = "n" * 100, "https://storage.example.org:8443/" + "p" * 200
    attempts = [TransferFailure(ErrorClass.SERVER_ERROR, f"{n} {'word ' * 120}", url[8:32]) for n in range(12)]
    facts = {"TransferHTTPStatusCode": 500, "LibcurlReturnCode": 22, "HttpCacheHost": "cache.example.org"}
    last = TransferFailure(ErrorClass.SERVER_ERROR, "last " + "word " * 120, url[8:32], developer=facts)
    slots, _ = roomy_slots([len(fitted(writer.ad(record(name, url)), 1 << 30))])
    ad = parse_ad(fitted(writer.ad(record(name, url, last, attempts)), slots[0].width - 1))
    elements = ad["TransferErrorData"]
    assert [element["ErrorString"].split()[0] for element in elements] == ["7", "8", "9", "10", "11", "last"]
    assert all(element["FailedServer"] == url[8:32] for element in elements)
    assert len(ad["TransferError"]) > 400
    assert set(facts) < set(ad["DeveloperData"])


@given(st.text(st.sampled_from("a\n\r\t\x7f\\\"'"), min_size=1))
def test_no_text_breaks_the_line_or_the_string_that_holds_it_in_a_record(name):
    ad = parse_ad(fitted(AdWriter(True, "1", Scrubber()).ad(record(name)), 4000))
    shown = ad["TransferFileName"]
    assert shown.replace("\\", "").isprintable() and not shown.endswith("\\")
    assert unquote(shown) == f"/scratch/{name}"


def test_a_file_in_custody_never_counts_as_delivered_for_want_of_room():
    writer, receipt = AdWriter(True, "1", Scrubber()), "router.example.org:9621 " + "0c" * 16 + " 1-1 9999999999"
    ad = writer.ad(record(result=Outcome(1, 1, developer={"StageOutCustody": receipt, "Fact": "x" * 300})))
    for width in range(200, 600):
        try:
            text = fitted(ad, width)
        except ValueError:
            continue
        assert receipt in text
    assert receipt in text


@pytest.mark.parametrize("character", ["\u00e9", "\U0001f600", '"', "\\"])
def test_messages_that_escapes_make_long_fit_the_least_slot(character):
    writer = AdWriter(True, "1", Scrubber())
    failure = TransferFailure(ErrorClass.NOT_FOUND, character * 500)
    width = least_bytes(writer.ad(record()))
    assert len(fitted(writer.ad(record(result=failure)), width)) <= width


def test_old_content_is_gone_and_size_stays(tmp_path):
    path = tmp_path / "out"
    path.write_text('[ Stale = "from the run before" ]' + "x" * 30_000)
    inode = path.stat().st_ino
    with OutFile(str(path)) as file:
        assert len(file.lay_out([100, 200], lambda: [50, 50])) == 2
        assert file.write(1, "[ a = 2 ]")
        assert file.write(0, "[ a = 1 ]")
        with pytest.raises(ValueError, match="slot of 4096"):
            file.write(0, "x" * 4096)
    assert (path.stat().st_ino, path.stat().st_size) == (inode, 30_033)
    assert [ad["a"] for ad in read_results(path.read_text())[0]] == [1, 2]


HAMMER = """
import sys, itertools
from stageout.plugin.outfile import OutFile
with OutFile(sys.argv[1]) as file:
    widths = file.lay_out([700] * 40, lambda: [300] * 40)
    for number in itertools.count():
        for index, width in enumerate(widths):
            file.write(index, '[ Index = %d; Text = "%s" ]' % (index, "x" * (number * 37 % (width - 60))))
        if not number:
            print("ready", flush=True)
"""


def test_sigkill_at_any_moment_leaves_whole_ads(tmp_path):
    """Writers that never rest are killed at random moments; every ad must be there, and whole."""
    path = tmp_path / "out"
    for seed in range(25):
        path.write_text(" " * PREALLOCATED_BYTES)
        with subprocess.Popen([sys.executable, "-c", HAMMER, path], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(random.Random(seed).uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        ads, unread = read_results(path.read_text())
        assert unread == ""
        assert [ad["Index"] for ad in ads] == list(range(40))


def call(plugin, scratch, files, tell="fail/NOT_FOUND"):
    """Ask for so many files with a pre-allocated output file in ``scratch``."""
    infile, outfile = scratch / "in", scratch / "out"
    ads = [{"Url": f"script://host/{tell}", "LocalFileName": f"{scratch}/f{index}"} for index in range(files)]
    infile.write_text("".join(map(unparse_ad, ads)))
    outfile.write_text(" " * PREALLOCATED_BYTES)
    return [plugin, "-infile", str(infile), "-outfile", str(outfile)], outfile


# Some versions of Python leave a module's bytecode cut off where it did not fit, for whoever imports it next.
NO_GROWTH = f"""
import os, resource, signal, sys
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({PREALLOCATED_BYTES}, {PREALLOCATED_BYTES}))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(("files", "told"), [(9, 9), (40, 40), (200, None)])
def test_a_file_that_cannot_grow_still_holds_the_report(tmp_path, files, told):
    plugin = installed(SCRIPTED, tmp_path)
    arguments, outfile = call(plugin, tmp_path, files)
    done = subprocess.run([sys.executable, "-c", NO_GROWTH, *arguments], capture_output=True, text=True, check=False)
    ads, unread = read_results(outfile.read_text())
    assert (done.returncode, unread, outfile.stat().st_size) == (1, "", PREALLOCATED_BYTES)
    assert told is None or len(ads) == told
    assert len(ads) > 30 or files < 30
    assert {ad["TransferError"] for ad in ads} == {"scripted NOT_FOUND"}


def test_what_cannot_be_reported_is_not_done(tmp_path):
    plugin = installed(SCRIPTED, tmp_path)
    arguments, outfile = call(plugin, tmp_path, 200, "ok")
    done = subprocess.run([sys.executable, "-c", NO_GROWTH, *arguments], capture_output=True, text=True, check=False)
    ads, _ = read_results(outfile.read_text())
    assert done.returncode == 11
    assert [(tmp_path / f"f{index}").exists() for index in range(200)] == [True] * len(ads) + [False] * (200 - len(ads))
    assert "not even a report fits" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_file_system_that_is_really_full(tmp_path):
    plugin = installed(SCRIPTED, tmp_path)
    assert PluginTable([plugin]).methods
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        arguments, outfile = call(plugin, disk, 40)
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(b"x" * 4096)
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        ads, unread = read_results(outfile.read_text())
        assert (done.returncode, len(ads), unread) == (1, 40, "")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_thousand_files(tmp_path):
    plugin = installed(SCRIPTED, tmp_path)
    arguments, outfile = call(plugin, tmp_path, 1200, "ok")
    started = time.monotonic()
    subprocess.run(arguments, check=True)
    ads, unread = read_results(outfile.read_text())
    assert (len(ads), unread) == (1200, "")
    assert all(ad["TransferSuccess"] for ad in ads)
    assert time.monotonic() - started < 20
