#!/bin/sh
# Remove what postinstall.sh has made. An RPM that is replaced (1) leaves it to its successor.
[ "$1" = 1 ] || find /opt/stageout/lib -depth -name __pycache__ -exec rm -rf {} +
