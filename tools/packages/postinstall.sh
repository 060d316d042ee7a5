#!/bin/sh
# Compile the modules once: plugins are in every job's way, and a job's user cannot write here.
set -e
umask 022
find /opt/stageout/lib -depth -name __pycache__ -exec rm -rf {} +
/opt/stageout/bin/python -m compileall -q /opt/stageout/lib
