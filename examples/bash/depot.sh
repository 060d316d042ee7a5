#!/bin/bash
# Moves one file to or from a storage that the node has mounted: replace the three lines with cp, sync and sha256sum.
# depot.sh put FILE PLACE   depot.sh get PLACE FILE   put prints "SIZE SHA256" of what is stored. Exit status as in sysexits.h.
set -u
what=$1 source=$2 target=$3
[ "$what" = get ] && place=$source || place=$target
# depot.tops has the mount points of the storage, one a line. Each has a file .depot in its top directory: where it is
# missing the storage is not mounted, and what is stored there would be on the disk of this node.
mapfile -t tops < "$(dirname -- "$0")/depot.tops"
root=
for top in "${tops[@]}"; do
    top=$(realpath -m -- "$top")
    case $(realpath -m -- "${place:-/}") in "$top"/*) root=$top ;; esac
done
[ -n "$root" ] || { echo "$place is below none of the mount points ${tops[*]}" >&2; exit 77; }
[ -e "$root/.depot" ] || { echo "$root is not mounted: it has no .depot" >&2; exit 69; }
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
