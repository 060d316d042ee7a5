"""Kinds of nodes and jobs on one real pool: what happens to the output of each (docs/developer/kinds.md).

``python -m tests.pool.kinds [VERSION]`` runs all of them and prints a table. Kinds with a test of their own elsewhere
are not repeated here.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from tests.harness.destination import Destination
from tests.harness.pool import NodeSpec, Pool, Submission
from tests.harness.pool.errors import PoolTimeout
from tests.harness.pool.image import PATH
from tests.harness.pool.waiting import wait_until
from tests.pool import lvm_stand_in
from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted

#: The plugin handed the output off, and the manager delivered it.
HAND_OFF = "hand-off"
#: The same, and the plugin copied the output first.
COPY = "cost by size"
#: HTCondor transferred nothing by URL.
NOTHING = "no URL"

#: Programs that nodes and jobs use, in a directory that all nodes see.
_PROGRAMS = {
    # A Java machine as far as HTCondor's starter sees it: properties, and the two records of HTCondor's wrapper.
    "java": """#!/bin/sh
case "$*" in *CondorJavaInfo*) printf 'JavaVendor = "none"\nJavaVersion = "17"\n'; exit ;; esac
while [ "$1" != CondorJavaWrapper ]; do shift; done
start=$2 end=$3; shift 4
: > "$start"
./job.sh "$@"
status=$?
echo normal > "$end"
exit $status
""",
    # A container runtime with the options of Apptainer that HTCondor uses: the image, with directories bound into it.
    "singularity": """#!/bin/sh
[ "$1" = --version ] && { echo "singularity-ce version 4.1.0"; exit; }
while [ "$1" != exec ]; do [ "$1" != test ] || exit 0; shift; done
shift
binds= pwd=/
while :; do
    case "$1" in
    -B) binds="$binds $2"; shift 2 ;;
    --pwd) pwd=$2; shift 2 ;;
    -S | -W | --home) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
export binds pwd
exec unshare --user --map-root-user --mount sh -ec '
mount -t tmpfs tmpfs /mnt
cp -dR "$0"/. /mnt
for bind in $binds /proc:/proc /dev:/dev; do
    place=/mnt${bind##*:}
    if [ -d "${bind%%:*}" ]; then mkdir -p "$place"; else mkdir -p "${place%/*}"; : > "$place"; fi
    mount --rbind "${bind%%:*}" "$place"
done
exec unshare --root /mnt --wd "$pwd" "$@"' "$@"
""",
    # A plugin that a job brings along: it copies files to where the URL says.
    "own_plugin": r"""#!/usr/bin/python3
import os, re, shutil, sys
if "-classad" in sys.argv:
    print('MultipleFileSupport = true\nPluginVersion = "1"\nPluginType = "FileTransfer"\nSupportedMethods = "own"')
    sys.exit(0)
with open(sys.argv[sys.argv.index("-outfile") + 1], "w") as out:
    for ad in re.findall(r"\[.*?\]", open(sys.argv[sys.argv.index("-infile") + 1]).read(), re.S):
        local, url = (re.search(key + ' = "([^"]*)"', ad)[1] for key in ("LocalFileName", "Url"))
        place = url.partition("://")[2]
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copy(local, place)
        out.write('[ TransferSuccess = true; TransferFileName = "%s"; TransferUrl = "%s"; TransferProtocol = "own"; '
                  'TransferType = "upload"; TransferFileBytes = 1; TransferTotalBytes = 1; TransferStartTime = 1; '
                  'TransferEndTime = 2; ConnectionTimeSeconds = 0.1 ]\n' % (local, url))
""",
}
#: Settings of the nodes, by name. Jobs choose one by its attribute Kind.
_NODES = {
    "plain": 'JAVA = {shared}/java\nSINGULARITY = {shared}/singularity\nSINGULARITY_BIND_EXPR = "/usr:/usr"\n'
    'DedicatedScheduler = "DedicatedScheduler@ap"\n'
    "STARTD_ATTRS = $(STARTD_ATTRS) DedicatedScheduler\n",
    "static": "NUM_SLOTS_TYPE_1 = 2\nSLOT_TYPE_1 = cpus=1\nSLOT_TYPE_1_PARTITIONABLE = false\n",
    "confined": "USE_PID_NAMESPACES = true\nMOUNT_UNDER_SCRATCH = /var/tmp\n",
    "encrypted": "ENCRYPT_EXECUTE_DIRECTORY = true\n",
    # Each job's directory is an ext4 filesystem of its own, which only the starter and its children see.
    "volumes": f"STARTD_ENFORCE_DISK_LIMITS = true\nLVM_VOLUME_GROUP_NAME = {lvm_stand_in.GROUP}\n"
    f'STARTD_ENVIRONMENT = "STAGEOUT_HANDOFF_TIMEOUT=30 PATH={{shared}}/lvm:{PATH}"\n',
}
_LVM_COMMANDS = ("vgs", "lvs", "lvcreate", "lvremove")

#: All jobs end at the same time, so nothing is refused because the machine is slow.
_PATIENT_EP = f"""{QUICK_EP}
STAGEOUT_HANDOFF_TIMEOUT = 30
STARTD_ENVIRONMENT = "STAGEOUT_HANDOFF_TIMEOUT=30"
"""


@dataclass(frozen=True)
class Kind:
    """One kind of node or job.

    :param name: as in docs/developer/kinds.md. :param expected: :data:`HAND_OFF`, :data:`NOTHING`, or a code of
        docs/user/synchronous.md. :param node: where it runs; "" for no choice.
    :param submit: lines that differ from those of other jobs; None removes one. :param act: what is done to the job.
    :param find_fault: returns what is wrong with HTCondor's records of the job, "" for nothing.
    :param not_on: version of HTCondor that does not run it here.
    """

    name: str
    expected: str
    node: str = "plain"
    submit: Mapping[str, str | None] = field(default_factory=dict)
    act: Callable[[Site, Submission], None] = lambda _site, _job: None
    find_fault: Callable[[Site, Submission], str] = lambda _site, _job: ""
    not_on: str = ""


def _evict(site: Site, job: Submission) -> None:
    def wrote() -> bool:
        return any(path for ep in site.pool.eps for path in ep.execute_dir.glob("dir_*/**/first"))

    site.pool.wait(wrote, what="the first run to write", timeout_s=90)
    site.pool.vacate(job)


#: The node's number and exit of a parallel job (NodeTerminatedEvent).
_NODE_TERMINATED = 15


def _find_parallel_records(site: Site, job: Submission) -> str:
    """Check that two nodes ran and sent their output, and that HTCondor wrote no record of a transfer.

    The agent knows one OUTPUT record per run, so it would not see what the other nodes handed off.
    """
    nodes = {event.get("Node") for event in site.pool.events(job) if event["Type"] == _NODE_TERMINATED}
    if nodes != {0, 1}:
        return f"these nodes ended: {nodes}"
    records = [kind for kind in ("INPUT", "OUTPUT") if site.pool.epoch(job, kind)]
    return f"HTCondor wrote {records}: see Receipts in schedd_agent/receipts.py" if records else ""


#: Writes, waits to be evicted, and ends at once when it runs again.
_TWO_RUNS = "grep -q ^NumJobStarts.=.0 .job.ad && { echo 1 > out1; echo 1 > first; exec sleep 600; };"
_TWO_RUNS += " echo second > out1; echo `sha256sum out1`"
_SHELL = {"executable": "/bin/sh", "transfer_executable": "false"}

KINDS = (
    Kind("partitionable slot", HAND_OFF),
    Kind("static slot", HAND_OFF, "static"),
    Kind("MOUNT_UNDER_SCRATCH, USE_PID_NAMESPACES", HAND_OFF, "confined", {
        "arguments": "/var/tmp/out1", "transfer_output_files": "var/tmp/out1",
    }),
    # 23.9 encrypts with eCryptfs, and starts no job on a kernel without it.
    Kind("ENCRYPT_EXECUTE_DIRECTORY", "Encrypted", "encrypted", not_on="23.9"),
    Kind("no transfer_output_files: all new files", HAND_OFF, submit={"transfer_output_files": None}),
    Kind("ON_EXIT_OR_EVICT, evicted once", HAND_OFF, submit={
        **_SHELL, "arguments": f"\"-c '{_TWO_RUNS}'\"", "when_to_transfer_output": "ON_EXIT_OR_EVICT",
    }, act=_evict),
    Kind("ON_SUCCESS", HAND_OFF, submit={"when_to_transfer_output": "ON_SUCCESS"}),
    Kind("java universe", HAND_OFF, submit={
        "universe": "java", "arguments": "Main out1", "transfer_input_files": "job.sh",
    }),
    Kind("container universe", HAND_OFF, submit={
        **_SHELL, "universe": "container", "container_image": "{shared}/image", "transfer_container": "false",
        "arguments": "\"-c 'cp /inside out1; echo `sha256sum out1`'\"",
    }),
    Kind("STARTD_ENFORCE_DISK_LIMITS", COPY, "volumes", {"request_disk": "60M"}, not_on="23.9"),
    # The dedicated scheduler of 23.9 sometimes needs minutes to claim its node.
    # Both nodes write the same, because both send it to the same URL.
    Kind("parallel universe", "Universe", submit={
        **_SHELL, "universe": "parallel", "machine_count": "2", "MY.ParallelShutdownPolicy": "\"WAIT_FOR_ALL\"",
        "arguments": "\"-c 'echo 1 > out1; echo `sha256sum out1`'\"",
    }, find_fault=_find_parallel_records, not_on="23.9"),
    Kind("local universe", NOTHING, "", {"universe": "local"}),
    Kind("scheduler universe", NOTHING, "", {"universe": "scheduler"}),
    Kind("a plugin that the job brings along", "NotSaid", submit={
        "transfer_plugins": "own={shared}/own_plugin", "output_destination": "own://{shared}/own/$(Cluster).$(Process)",
    }),
)  # fmt: skip


@contextmanager
def kinds_site(version: str, destination: Destination, pools: Callable[..., Any] = Pool) -> Iterator[Site]:
    """Run a pool with a node of each kind that jobs of :func:`kinds_of` this version use."""
    used = {kind.node for kind in kinds_of(version)}
    with open_directory("kinds") as shared, _no_mapper_left():
        for name, text in _PROGRAMS.items():
            (shared / name).write_text(text)
            (shared / name).chmod(0o755)
        _make_image(shared / "image")
        _install_lvm(shared / "lvm")
        (shared / "own").mkdir()
        (shared / "own").chmod(0o1777)
        nodes = [
            NodeSpec(config=f'{text.format(shared=shared)}Kind = "{name}"\nSTARTD_ATTRS = $(STARTD_ATTRS) Kind\n')
            for name, text in _NODES.items()
            if name in used
        ]
        options = {"ap_config": QUICK_AP, "ep_config": _PATIENT_EP, "binds": (shared,)}
        with pools(version=version, execute_points=nodes, cpus=4, **options) as pool:
            wait_until_acquainted(pool)
            yield Site(pool, destination, f"kinds-{version}", shared)


def kinds_of(version: str | None) -> Sequence[Kind]:
    """Kinds that this version of HTCondor runs on this machine."""
    has_loop = Path("/dev/loop-control").exists()
    return [kind for kind in KINDS if kind.not_on != version and (has_loop or kind.node != "volumes")]


def _install_lvm(place: Path) -> None:
    """Make the stand-ins for LVM's commands, and this machine's mke2fs, which the images of nodes lack."""
    place.mkdir()
    for name in _LVM_COMMANDS:
        (place / name).write_text(f"#!/usr/bin/python3\n{Path(lvm_stand_in.__file__).read_text()}")
    program = shutil.which("mke2fs", path=PATH)
    assert program, "there is no mke2fs on this machine: install e2fsprogs"
    needed = subprocess.run(["ldd", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    for library in re.findall(r"=> (/\S+)", needed):
        if not Path(library).name.startswith("libc."):
            shutil.copy(library, place)
    shutil.copy(program, place / "mke2fs.here")
    (place / "mke2fs").write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={place} exec {place}/mke2fs.here "$@"\n')
    for path in place.iterdir():
        path.chmod(0o755)


@contextmanager
def _no_mapper_left() -> Iterator[None]:
    """Remove the directory over which a node has mounted its own, if this machine had none."""
    mapper = Path("/dev/mapper")
    was_there = mapper.exists()
    try:
        yield
    finally:
        if not was_there:
            with contextlib.suppress(FileNotFoundError):
                mapper.rmdir()


def _make_image(place: Path) -> None:
    """Make the directory of a container image, into which /usr is bound."""
    (place / "usr").mkdir(parents=True)
    (place / "inside").write_text("inside the container\n")
    for name in ("bin", "lib", "lib64"):
        (place / name).symlink_to(f"usr/{name}")


def run_kinds(site: Site) -> Iterator[tuple[Kind, str]]:
    """Run a job of each kind at the same time. Yields what happened: as ``Kind.expected``, or what is wrong."""
    jobs = [(kind, _submit(site, kind)) for kind in kinds_of(site.pool.version)]
    for kind, job in jobs:
        kind.act(site, job)
    for kind, job in jobs:
        yield kind, _happened(site, kind, job)


def _submit(site: Site, kind: Kind) -> Submission:
    lines = {
        "executable": "job.sh",
        "arguments": "out1",
        "should_transfer_files": "YES",
        "when_to_transfer_output": "ON_EXIT",
        "transfer_output_files": "out1",
        "output_destination": f"{site.url()}/$(Cluster).$(Process)",
        "request_memory": "50",
        "request_disk": "10M",
        "requirements": f'TARGET.Kind == "{kind.node}"' if kind.node else None,
        **kind.submit,
    }
    text = "".join(f"{name} = {value}\n" for name, value in lines.items() if value is not None)
    text = text.replace("{shared}", str(site.gates))
    return site.pool.submit("alice", f"{text}queue\n", files={"job.sh": JOB})


def _happened(site: Site, kind: Kind, job: Submission) -> str:
    try:
        wait_until(lambda: site.pool.status(job) in ("Gone", "Held"), timeout_s=60, what=f"the end of {kind.name}")
    except PoolTimeout:
        return f"{site.pool.status(job)}: {site.pool.why(job)}"
    ad = site.pool.history(job)
    if ad is None:
        reason = (site.pool.q(job) or {}).get("HoldReason")
        return f"held: {reason} {(job.dir / 'job.err').read_text() if (job.dir / 'job.err').exists() else ''}"
    if not site.wrote(job):
        return "the job wrote nothing"
    place = site.file(job, "")
    if "{shared}" in (kind.submit.get("output_destination") or ""):
        place = site.gates / "own" / str(job)
    if not place.exists() and all((job.dir / name).exists() for name in site.wrote(job)):
        return NOTHING
    for name, digest in site.wrote(job).items():
        found = place / name.lstrip("/")
        if not found.exists() or hashlib.sha256(found.read_bytes()).hexdigest() != digest:
            return f"{found} is missing, or not what the last run wrote"
    return kind.find_fault(site, job) or _said(site, job, ad)


def _said(site: Site, job: Submission, ad: Mapping[str, Any]) -> str:
    """Return the kind of delivery, by the job's ad and the records of its last run."""
    if ad.get("TransferOutputStats", {}).get("STAGEOUTFilesCountLastRun", 0):
        if ad["StageOutState"] != "Delivered":
            return f"StageOutState {ad['StageOutState']}"
        return COPY if _was_copied(site, job) else HAND_OFF
    if "StageOutSynchronousCode" in ad:
        return str(ad["StageOutSynchronousCode"])
    results = site.epoch_results(job)
    return str(results[-1].get("DeveloperData", {}).get("StageOutSynchronousCode", "NotSaid")) if results else NOTHING


def _was_copied(site: Site, job: Submission) -> bool:
    """True when the log of a manager says that it took the job's last output over by copies."""
    ticket = site.epoch_results(job)[-1]["DeveloperData"]["StageOutReceipt"]["Ticket"]
    lines = "".join(ep.log("SandboxManagerLog") for ep in site.pool.eps).splitlines()
    return any(" output-copied " in line and f"ticket={ticket}" in line for line in lines)


def _main(version: str) -> int:
    wrong = 0
    with open_directory("destination") as home, Destination(home) as server, kinds_site(version, server) as site:
        print(f"| HTCondor {version} | what happens |\n|---|---|")
        for kind, seen in run_kinds(site):
            wrong += seen != kind.expected
            print(
                f"| {kind.name} | {seen}{'' if seen == kind.expected else f' (expected: {kind.expected})'} |",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:] or ["25.14"]))
