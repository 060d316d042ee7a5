"""HTCondor's settings for the nodes: what a site would have, but quick, and on the loopback interface."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool.image import PREFIX

DOMAIN = "stageout.test"
"""UID_DOMAIN and TRUST_DOMAIN of every pool; the first is what stands after the @ in a job's User."""

_COMMON = """\
# Written by tests.harness.pool; files with higher numbers in this directory win.
if version >= 23.10.0
    use security:recommended
else
    use security:recommended_v9_0
endif

LOCAL_DIR = {home}
LOG = $(LOCAL_DIR)/log
SPOOL = $(LOCAL_DIR)/spool
EXECUTE = $(LOCAL_DIR)/execute
LOCK = $(LOCAL_DIR)/lock
RUN = /run/condor
DAEMON_SOCKET_DIR = /run/condor/sock
CRED_STORE_DIR = $(LOCAL_DIR)/creds

NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = false
ENABLE_IPV6 = false
CONDOR_HOST = 127.0.0.1
COLLECTOR_PORT = {port}
COLLECTOR_HOST = $(CONDOR_HOST):$(COLLECTOR_PORT)
SHARED_PORT_PORT = {shared_port}

# Jobs run as their owner on every node; the nodes share no filesystem as far as HTCondor knows.
UID_DOMAIN = {domain}
TRUST_UID_DOMAIN = true
SOFT_UID_DOMAIN = true
FILESYSTEM_DOMAIN = {name}.{domain}

# Daemons of the nodes know each other by tokens of one signing key, users of the AP by the filesystem.
TRUST_DOMAIN = {domain}
SEC_PASSWORD_DIRECTORY = $(LOCAL_DIR)/secrets/passwords.d
SEC_TOKEN_POOL_SIGNING_KEY_FILE = $(SEC_PASSWORD_DIRECTORY)/POOL
SEC_TOKEN_SYSTEM_DIRECTORY = $(LOCAL_DIR)/secrets/tokens.d
SEC_TOKEN_DIRECTORY = {user_tokens}
ALLOW_DAEMON = condor@*, condor@password, condor@family
QUEUE_SUPER_USERS = root, condor

# Killed daemons are back after a second or two, not ten.
MASTER_BACKOFF_CONSTANT = 1
MASTER_BACKOFF_FACTOR = 1.2
MASTER_BACKOFF_CEILING = 3
MASTER_UPDATE_INTERVAL = 5
STARTER_UPDATE_INTERVAL = 5
STARTER_INITIAL_UPDATE_INTERVAL = 1
SHADOW_QUEUE_UPDATE_INTERVAL = 5
RUNBENCHMARKS = 0

STAGEOUT_BIN = {prefix}/bin
"""

_AP = """\
use ROLE: CentralManager
use ROLE: Submit

SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
# Leaving of completed jobs is decided in the periodic evaluation.
PERIODIC_EXPR_INTERVAL = 2
PERIODIC_EXPR_TIMESLICE = 0.5
# DAGMan warns of logs below /tmp, and takes a warning for an error.
DAGMAN_USE_STRICT = 0
DAGMAN_USER_LOG_SCAN_INTERVAL = 1
"""

_EP = """\
use ROLE: Execute
use FEATURE: PartitionableSlot

NUM_CPUS = {cpus}
UPDATE_INTERVAL = 2
UPDATE_OFFSET = 0
POLLING_INTERVAL = 1
"""

# The product's fragments add daemons; a pool without the agent or the manager takes the list back.
_DAEMONS_ONLY = {
    "ap": "DAEMON_LIST = MASTER, SHARED_PORT, COLLECTOR, NEGOTIATOR, SCHEDD\n",
    "ep": "DAEMON_LIST = MASTER, SHARED_PORT, STARTD\n",
}


@dataclass(frozen=True)
class NodeConfig:
    """The node's ``config.d``: 00 the pool's, 10-89 the product's fragments, 90 and above what a test adds."""

    directory: Path

    def write(self, name: str, text: str) -> None:
        """Write one file, whole or not at all."""
        aside = self.directory / f".{name}"
        aside.write_text(text if text.endswith("\n") else f"{text}\n")
        aside.rename(self.directory / name)

    def add_fragments(self, fragments: Iterable[Path]) -> None:
        """Copy configuration fragments of the product, unchanged."""
        for path in fragments:
            shutil.copy(path, self.directory / path.name)


def base_text(role: str, name: str, home: Path, *, port: int, cpus: int, user: str) -> str:
    """The pool's own settings for a node.

    :param role: "ap" or "ep".
    :param port: TCP port of the pool's collector on the loopback interface.
    :param cpus: NUM_CPUS of an EP.
    :param user: who runs condor_master.
    """
    common = _COMMON.format(
        home=home,
        port=port,
        name=name,
        domain=DOMAIN,
        prefix=PREFIX,
        shared_port="$(COLLECTOR_PORT)" if role == "ap" else "0",
        user_tokens="$(LOCAL_DIR)/secrets/tokens.d" if user != "root" else "~/.condor/tokens.d",
    )
    return common + (_AP if role == "ap" else _EP.format(cpus=cpus))


def daemons_only(role: str) -> str:
    """Settings that leave only HTCondor's own daemons on a node."""
    return _DAEMONS_ONLY[role]


def make_directories(home: Path, ids: tuple[int, int], condor_ids: tuple[int, int]) -> None:
    """Make a node's directories with the owners that HTCondor wants.

    :param ids: uid and gid of who runs condor_master.
    :param condor_ids: those of the user condor, who owns LOG, SPOOL and EXECUTE below a root master.
    """
    owner = condor_ids if ids[0] == 0 else ids
    home.mkdir(mode=0o755)
    os.chown(home, *ids)
    for name, mode in (("log", 0o755), ("spool", 0o755), ("execute", 0o755), ("lock", 0o1777)):
        _make(home / name, mode, owner)
    for name, mode in (
        ("config.d", 0o755),
        ("secrets", 0o700),
        ("secrets/passwords.d", 0o700),
        ("secrets/tokens.d", 0o700),
    ):
        _make(home / name, mode, ids)


def _make(path: Path, mode: int, ids: tuple[int, int]) -> None:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, *ids)


def write_secret(path: Path, data: bytes, ids: tuple[int, int]) -> None:
    """Write a key or token that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as stream:
        stream.write(data)
    os.chown(path, *ids)
