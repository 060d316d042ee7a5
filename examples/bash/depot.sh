#!/bin/bash
# Moves one file to or from a storage that the node has mounted: replace the three lines with cp, sync and sha256sum.
# depot.sh put FILE PLACE   depot.sh get PLACE FILE   put prints "SIZE SHA256" of what is stored. Exit status as in sysexits.h.
set -u
what=$1 source=$2 target=$3
[ "$what" = get ] && place=$source || place=$target
# The top directory of the storage has a file .depot. Where it is not above the place, the storage is not mounted: what
# is stored there would be on the disk of this node.
root=$(realpath -m -- "${place:-/}")
until [ -e "$root/.depot" ]; do
    [ "$root" != / ] || { echo "$place is not on a mounted storage: no directory above it has .depot" >&2; exit 69; }
    root=$(dirname -- "$root")
done
[ -e "$source" ] || { echo "$source does not exist" >&2; exit 66; }
[ -r "$source" ] || { echo "$source cannot be read" >&2; exit 77; }
mkdir -p -- "$(dirname -- "$target")" 2>/dev/null
[ -w "$(dirname -- "$target")" ] || { echo "no permission to write $target" >&2; exit 77; }
[ ! -d "$target" ] || { echo "$target is a directory" >&2; exit 73; }
part=$(dirname -- "$target")/.$(basename -- "$target").$$
trap 'rm -f "$part"' EXIT
trap 'exit 75' TERM
cp -- "$source" "$part" & wait $! || { echo "$target was not written" >&2; exit 75; }
sync -- "$part" && mv -T -- "$part" "$target" || { echo "$target was not stored" >&2; exit 75; }
[ -e "$root/.depot" ] || { echo "$root was unmounted during the transfer" >&2; exit 69; }
[ "$what" = get ] || echo "$(stat -c %s -- "$target") $(sha256sum < "$target" | cut -d' ' -f1)"
