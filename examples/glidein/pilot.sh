#!/bin/bash
# A pilot: master, startd and sandbox manager of one ordinary user that join a pool, run jobs and deliver their output.
# Batch job of a site, or entry point of a container (Containerfile). docs/pilot/index.md explains what happens at the end.
#
# Wants HTCondor's programs (in PATH, or CONDOR_DIR = an unpacked tarball) and, beside this script or as STAGEOUT_PILOT,
# the file stageout-pilot.pyz. Settings come from the environment:
#   POOL         host:port of the pool's collector (required)
#   TOKEN        file with a token that has ADVERTISE_STARTD, ADVERTISE_MASTER and READ (required)
#   LIFE_S       seconds until the pilot ends by itself; empty: when it is told to
#   GRACE_S      seconds that the site gives between SIGTERM and SIGKILL (120)
#   WORK_DIR     where everything is put; a new directory below TMPDIR when empty, removed at the end
#   CONFIG       file with further HTCondor settings
set -euo pipefail

die() {
    echo "pilot: $*" >&2
    exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pyz=${STAGEOUT_PILOT:-$here/stageout-pilot.pyz}
grace_s=${GRACE_S:-120}
[ -n "${POOL:-}" ] || die "POOL is not set: host:port of the collector"
[ -r "${TOKEN:-}" ] || die "TOKEN is not a file that can be read"
[ -f "$pyz" ] || die "there is no $pyz; make it with 'make pilot'"
if ! [ "$grace_s" -ge 30 ] 2>/dev/null; then
    die "GRACE_S is ${grace_s}: at least 30 s are needed to say what is lost"
fi
[ -z "${CONDOR_DIR:-}" ] || PATH=$CONDOR_DIR/bin:$CONDOR_DIR/sbin:$PATH
master=$(PATH=$PATH:/usr/sbin:/usr/local/sbin command -v condor_master) || die "condor_master is not in PATH"
release=${CONDOR_DIR:-$(cd "$(dirname "$master")/.." && pwd)}
# Packages of a system have a directory of their own for these, a tarball has not.
libexec=$release/libexec
[ -x "$libexec/condor_shared_port" ] || libexec=$libexec/condor

remove=
work=${WORK_DIR:-}
if [ -z "$work" ]; then
    work=$(mktemp -d "${TMPDIR:-/tmp}/pilot.XXXXXXXX")
    remove=$work
fi
mkdir -p "$work"/{log,spool,execute,lock,tokens.d,config.d}
chmod 0700 "$work/tokens.d"
install -m 0600 "$TOKEN" "$work/tokens.d/pool"

# The vacate time, the manager's grace and some seconds for the master itself fit into what the site gives.
vacate_s=$((grace_s / 8))
manager_s=$((grace_s - vacate_s - grace_s / 8))
end=0
[ -z "${LIFE_S:-}" ] || end=$(($(date +%s) + LIFE_S))

# A copy, because it unpacks beside itself.
install -m 0755 "$pyz" "$work/stageout-pilot.pyz"
"$work/stageout-pilot.pyz" links "$work/bin" || die "$pyz does not start: see above"
site=$(echo "$work"/.stageout-pilot/*-cp*)
cp "$site"/condor_config.d/*.conf "$work/config.d/"

cat >"$work/condor_config" <<EOF
LOCAL_DIR = $work
RELEASE_DIR = $release
LIBEXEC = $libexec
LOG = \$(LOCAL_DIR)/log
SPOOL = \$(LOCAL_DIR)/spool
EXECUTE = \$(LOCAL_DIR)/execute
LOCK = \$(LOCAL_DIR)/lock
RUN = \$(LOCAL_DIR)/lock
DAEMON_SOCKET_DIR = auto
LOCAL_CONFIG_DIR = $work/config.d
REQUIRE_LOCAL_CONFIG_FILE = false
use security:recommended_v9_0
SEC_DEFAULT_AUTHENTICATION_METHODS = TOKEN, FS
SEC_TOKEN_DIRECTORY = $work/tokens.d
SEC_TOKEN_SYSTEM_DIRECTORY = $work/tokens.d
ALLOW_ADMINISTRATOR = condor_pool@*, $(id -un)@*
COLLECTOR_HOST = $POOL
MASTER_NAME = pilot_$$
STARTD_NAME = pilot_$$
DAEMON_LIST = MASTER, STARTD
use FEATURE: PartitionableSlot
IS_GLIDEIN = true
STARTD_ATTRS = \$(STARTD_ATTRS) IS_GLIDEIN
STAGEOUT_BIN = $work/bin
STAGEOUT_PILOT_END = $end
STAGEOUT_PILOT_GRACE = $manager_s
# The bindings that come with HTCondor, for the manager.
SANDBOX_MANAGER_ENVIRONMENT = "PYTHONPATH=\$(RELEASE_DIR)/lib/python3"
EOF
cat >"$work/config.d/90-pilot.conf" <<EOF
MachineMaxVacateTime = $vacate_s
EOF
[ -z "${CONFIG:-}" ] || cp "$CONFIG" "$work/config.d/95-site.conf"

export CONDOR_CONFIG=$work/condor_config
unset _CONDOR_EXECUTE CONDOR_INHERIT
"$master" -f &
pid=$!
echo "pilot: condor_master has pid $pid, its logs are in $work/log"

# shellcheck disable=SC2329  # the trap calls it
stop() {
    echo "pilot: told to stop, $grace_s s of grace"
    kill -TERM "$pid" 2>/dev/null || true
}
trap stop TERM INT QUIT
timer=
if [ "$end" -gt 0 ]; then
    (
        trap 'kill "$sleeper" 2>/dev/null' TERM
        sleep "$LIFE_S" &
        sleeper=$!
        wait "$sleeper" && kill -TERM "$pid"
    ) &
    timer=$!
fi

# wait returns when a signal comes, too: only the end of the master counts.
status=0
while kill -0 "$pid" 2>/dev/null; do
    status=0
    wait "$pid" || status=$?
done
[ -z "$timer" ] || kill "$timer" 2>/dev/null || true
grep -E ' (sandbox-lost|pilot-drained|output-retained) ' "$work/log/SandboxManagerLog" | tail -n 50 || true
[ -z "$remove" ] || rm -rf "$remove"
exit "$status"
