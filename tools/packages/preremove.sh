#!/bin/sh
# Remove what postinstall.sh has made. An RPM that is replaced (1) leaves it to its successor.
# The sandbox manager has stored answers of the plugins; they are stale after an upgrade in any case.
[ "$1" = 1 ] || find /opt/stageout/lib -depth -name __pycache__ -exec rm -rf {} +
rm -f /opt/stageout/bin/*.answer
