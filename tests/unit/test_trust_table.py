"""The table of what the product reads: complete, the same as the lists of the access point, and not in a job's way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ad_reads
import pytest
from ad_reads import all_reads, attributes_in, product, variables_in

from sandbox_manager.intake.startd import JOB_ATTRIBUTES, SLOT_ATTRIBUTES
from schedd_agent import outcomes, queue, receipts
from stageout.cli import explain, jobs, outputs
from stageout.cli.doctor.config import AGENT_IN_SPOOL, GUARDED, OPEN, SHOWN, USEFUL_JOB_ATTRIBUTES
from stageout.core import history
from stageout.core.trust import (
    SOURCES,
    AtSubmission,
    Kind,
    Part,
    deleted_at_submission,
    matching,
    names_of,
    protected_attributes,
)
from stageout.wire import custody, renewal, services
from stageout.wire.services import LETTER_ATTRIBUTES
from stageout_web import queue_child, reader

ROOT = Path(__file__).resolve().parents[2]
FRAGMENT = (ROOT / "condor_config.d/20-stageout-ap.conf").read_text()
NODE_FRAGMENT = (ROOT / "condor_config.d/20-stageout-ep.conf").read_text()

#: Texts where an attribute could be, which are none -> what they are.
NO_ATTRIBUTES = {
    "Authorization": "header of HTTP", "ETag": "header of HTTP", "Host": "header of HTTP",
    "EdDSA": "algorithm of a signature",
    "AmazonS3": "name of a server", "MinIO": "name of a server",
    "EndpointError": "code of Globus", "ExternalError": "code of Globus",
    "NoSpace": "type of an error", "TooSlow": "type of an error", "Transfer": "type of an error",
    "HandedOver": "state of output", "Unknown": "word for a status",
    "OverlayGet": "operation of the overlay", "OverlayGetPack": "operation of the overlay",
    "OverlayList": "operation of the overlay", "OverlayOpen": "operation of the overlay",
    "OverlayOperation": "operation of the overlay", "OverlayPack": "operation of the overlay",
    "OverlayStat": "operation of the overlay",
    "StageOutProbe": "type of an ad that the doctor writes", "FileTransfer": "type of a plugin",
    "StageOut": "transform", "StageOutInit": "transform",
    "Fa": "part of a regular expression", "Za": "part of a regular expression", "Size": "answer of gsiftp",
    "x509proxy": "field of a request to estimate", "JobStatusOnRelease": "only written",
    "LeaveJobInQueue": "the doctor's text", "HTCondor": "the doctor's text", "Identity": "code of a refusal",
}  # fmt: skip
#: Its texts are a plugin that it writes for a developer.
_TEMPLATE = "stageout/cli/plugin_new.py"
#: Its lists are names in the configuration.
_LISTS = "stageout/cli/doctor/config.py"


def unlisted(reads: list[ad_reads.Read]) -> list[ad_reads.Read]:
    """Return the reads that the table lacks."""
    known = names_of(*Kind) | NO_ATTRIBUTES.keys()
    return [read for read in reads if read.name not in known and not read.place.startswith(_TEMPLATE)]


def test_everything_that_is_read_is_in_the_table() -> None:
    reads = all_reads()
    assert unlisted(reads) == []
    assert len({read.name for read in reads}) > 150, "the search finds what the product reads"


def test_an_attribute_that_is_not_in_the_table_is_found() -> None:
    (lost,) = unlisted([ad_reads.Read("RemoteWallClockTime", Part.AGENT, "x.py:1")])
    assert lost.name == "RemoteWallClockTime"


def test_the_table_names_each_part_that_reads() -> None:
    readers: dict[str, set[Part]] = {}
    for source in SOURCES:
        for name in source.names:
            readers.setdefault(name, set()).update(source.readers)
    wrong = [read for read in all_reads() if read.name in readers and read.part and read.part not in readers[read.name]]
    assert [read for read in wrong if not read.place.startswith((_TEMPLATE, _LISTS))] == []


def test_no_attribute_of_ours_is_in_the_table_for_nothing() -> None:
    """Each is read by the code, or by the expressions of the fragments."""
    read = {found.name for found in all_reads()}
    texts = "\n".join(path.read_text() for path in (ROOT / "condor_config.d").glob("*.conf"))
    product_text = "\n".join(path.read_text() for path, _ in product() if path.name != "trust.py")
    ours = {name for name in names_of(Kind.JOB, Kind.SLOT, Kind.SCRATCH) if name.startswith("StageOut")}
    assert [name for name in ours if name not in read and not re.search(rf"\b{name}\b", texts + product_text)] == []
    assert not NO_ATTRIBUTES.keys() - read


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('value = ad["JobStatus"]', ["JobStatus"]),
        ('ad["JobStatus"] = 4', []),
        ('number("NumShadowStarts") + ad.integer("ProcId", -1)', ["NumShadowStarts", "ProcId"]),
        ('has = "RemotePool" in ad or "LastRemotePool" not in ad', ["RemotePool", "LastRemotePool"]),
        ('WANTED = ["Owner", "ClusterId"]', ["Owner", "ClusterId"]),
        ('TITLES = ("Owner", "Files")', []),
        ('f"JobStatus == {four} && Owner == \\"Bob\\""', ["JobStatus", "Owner"]),
        ('ad.get("Owner" if mine else "ProcId")', ["Owner", "ProcId"]),
        ('COLUMNS = {"state": "JobStatus", "more": ""}', ["JobStatus"]),
        ('DAYS = {"state": "Monday", "more": "Friday"}', []),
        ('"""Return JobStatus == 4."""', []),
        ('__all__ = ["JobStatus", "JobOutcome"]', []),
        ('text = "Jobs that wait"', []),
    ],
)
def test_how_reads_are_found(code: str, names: list[str]) -> None:
    found = {name for name, _ in attributes_in(code)}
    assert found == set(names)


def test_every_variable_that_is_read_is_in_the_table() -> None:
    known = names_of(Kind.ENVIRONMENT)
    found = {name for path, _ in product() for name, _ in variables_in(path.read_text())}
    assert found - known == set()
    assert len(found) > 10
    example = 'a = os.environ["A"]; os.environ.get("B"); os.environ["C"] = ""; "D" in os.environ; environment.ad("E")'
    assert [name for name, _ in variables_in(example)] == ["A", "B", "D", "E"]


def test_projections_of_jobs() -> None:
    at_the_schedd = [
        *queue.PROJECTION, *outcomes.PROJECTION, *jobs.ATTRIBUTES, *outputs.OUTPUT_ATTRIBUTES, *explain.ATTRIBUTES,
        *queue_child.JOB_ATTRIBUTES,
    ]  # fmt: skip
    assert set(at_the_schedd) - names_of(Kind.JOB) == set()
    assert {*SLOT_ATTRIBUTES, *JOB_ATTRIBUTES} - names_of(Kind.SLOT) == set()
    read_by_page = {*reader._REPORT, *reader._FIGURES, *LETTER_ATTRIBUTES}
    assert read_by_page - names_of(Kind.COLLECTOR) == set()


def test_the_node_shows_what_the_manager_reads() -> None:
    (shown,) = re.findall(r"^STARTD_JOB_ATTRS = \$\(STARTD_JOB_ATTRS\) (.+)$", NODE_FRAGMENT, re.M)
    assert set(shown.split()) == set(JOB_ATTRIBUTES)
    assert set(USEFUL_JOB_ATTRIBUTES) <= names_of(Kind.SLOT)


def test_messages_and_files() -> None:
    types = {custody.MANAGER_AD, custody.AGENT_AD, custody.ORDERS_AD, custody.BUCKET_AD, services.ROUTER_AD}
    types |= {services.POLICY_AD, renewal.KIND}
    assert types - names_of(Kind.MESSAGE) == set()
    assert {*AGENT_IN_SPOOL, receipts.DIRECTORY, history.FILE_NAME} - names_of(Kind.FILE) == set()


def test_the_transform_deletes_what_is_no_wish() -> None:
    (body,) = re.findall(r"^JOB_TRANSFORM_StageOutInit @=end\n(.*?)^@end$", FRAGMENT, re.M | re.S)
    deleted = re.findall(r"^  DELETE  (\w+)$", body, re.M)
    assert len(deleted) == len(set(deleted))
    assert set(deleted) == set(deleted_at_submission())
    replaced = [name for source in SOURCES if source.at_submission is AtSubmission.SET for name in source.names]
    assert replaced == re.findall(r"^  SET  (\w+) (?:false|true)$", body, re.M)
    assert "REQUIREMENTS" not in body, "for all jobs"


def test_all_job_attributes_of_ours_have_a_rule_at_submission() -> None:
    names = {name for name in names_of(Kind.JOB) if name.startswith("StageOut")}
    ruled = [name for source in SOURCES if source.at_submission is not AtSubmission.OTHERS for name in source.names]
    assert len(ruled) == len(set(ruled))
    assert set(ruled) == names


def test_values_are_deleted_before_any_transform_writes_them() -> None:
    lists = re.findall(r"^JOB_TRANSFORM_NAMES = \$\(JOB_TRANSFORM_NAMES\) (.+)$", FRAGMENT, re.M)
    assert lists[0].split()[0] == "StageOutInit"
    written = set(re.findall(r"^  (?:SET|EVALSET|DEFAULT)  ?(StageOut\w+)", FRAGMENT, re.M))
    assert written <= names_of(Kind.JOB)
    defaults = set(re.findall(r"^  DEFAULT (StageOut\w+)", FRAGMENT, re.M))
    assert defaults == {"StageOutAsync", "StageOutUserLeave"}
    assert not defaults & set(deleted_at_submission()), "DEFAULT finds the UNDEFINED that DELETE leaves behind"


def test_protected_attributes_are_those_of_the_fragment() -> None:
    (listed,) = re.findall(r"^PROTECTED_JOB_ATTRS = \$\(PROTECTED_JOB_ATTRS\) (.+)$", FRAGMENT, re.M)
    assert set(listed.split()) == protected_attributes()
    assert set(GUARDED) | set(SHOWN) <= protected_attributes()
    assert not protected_attributes() & OPEN.keys()


def test_secure_attributes() -> None:
    assert re.findall(r"^SECURE_JOB_ATTRS = (.+)$", FRAGMENT, re.M) == ["$(SECURE_JOB_ATTRS) GlobalJobId"]


def test_rows_are_sentences() -> None:
    for source in SOURCES:
        assert source.names and source.readers and source.writers
        assert source.when_false.endswith(".") and source.when_false.lstrip("`")[0].isalpha()
    for kind in Kind:
        names = [name for source in SOURCES if source.kind is kind for name in source.names]
        assert len(names) == len(set(names)), kind


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["Chirp*"], []),
        (["stageoutguard"], ["StageOutGuard"]),
        (["StageOut"], []),
        (["S*d"], ["StageOutGuard"]),
        (["*"], ["GlobalJobId", "StageOutGuard"]),
        (["*job*", "x"], ["GlobalJobId"]),
        (["*Id"], ["GlobalJobId"]),
        (["G[l]*"], []),
    ],
)
def test_patterns_of_htcondor(patterns: list[str], found: list[str]) -> None:
    assert matching(patterns, ["GlobalJobId", "StageOutGuard"]) == found


def test_plugins_and_hand_offs_do_not_load_the_table() -> None:
    code = (
        "import sys, stageout.plugin.query, stageout.handoff.client, stageout.plugin.session; "
        "print('stageout.core.trust' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
