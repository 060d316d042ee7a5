#!/bin/sh
# A whole pool in one container: starts it, submits two jobs as alice, and shows them until their output is delivered.
# A command behind it, such as bash, runs afterwards, with the pool.
set -eu
as_alice() { setpriv --reuid alice --regid alice --init-groups env HOME=/home/alice "$@"; }
for folder in /run/condor /run/lock/condor; do
    mkdir -p "$folder"
    chown condor: "$folder"
done
condor_master -f >/dev/null 2>&1 &
tries=0
until stageout doctor >/tmp/doctor 2>&1; do
    tries=$((tries + 1))
    if [ $tries -ge 120 ]; then
        cat /tmp/doctor
        exit 1
    fi
    sleep 1
done
echo "The pool is up."
cd /home/alice
as_alice condor_submit two.sub
as_alice stageout wait 1 >/tmp/verdict 2>&1 &
waiting=$!
while kill -0 $waiting 2>/dev/null; do
    as_alice condor_q -nobatch
    as_alice stageout status
    sleep 2
done
cat /tmp/verdict
wait $waiting
echo "They go from the queue to the history."
until [ "$(as_alice condor_history 1 -af ProcId | wc -l)" = 2 ]; do sleep 1; done
as_alice condor_history 1 -af:j Owner StageOutState
ls -l results/*
if [ $# -gt 0 ]; then exec "$@"; fi
