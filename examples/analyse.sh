#!/bin/sh
# Stands for an analysis: reads its input, writes three files. usage: analyse.sh INPUT NUMBER
set -e
head -c 20000000 /dev/urandom >histograms.dat
head -c 1000000 "$1" >selected.dat
{ echo "part $2"; sha256sum histograms.dat selected.dat; } >summary.txt
