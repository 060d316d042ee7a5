#!/bin/bash
# Custom script for glideinWMS: adds the sandbox manager and the transfer plugins to a glidein. In the file list of the
# factory or the frontend, before condor starts:
#   <file absfname="/path/stageout-pilot.pyz"/>
#   <file absfname="/path/glideinwms_stageout.sh" executable="True"/>
# Arguments: the glidein's configuration file, and the entry id. A node without a Python that the file knows runs as
# before: its jobs upload by themselves.
glidein_config=$1
name=$(basename "$0")

# Path of a shell library of the framework, which it writes into its configuration.
# shellcheck disable=SC1090
. "$(grep -m1 '^ADD_CONFIG_LINE_SOURCE ' "$glidein_config" | cut -d ' ' -f 2-)"
error_gen=$(gconfig_get ERROR_GEN_PATH "$glidein_config")
# add_condor_vars_line reads this variable
# shellcheck disable=SC2034
condor_vars_file=$(gconfig_get CONDOR_VARS_FILE "$glidein_config")

fail() {
    "$error_gen" -error "$name" "$1" "$2" "stageout" "$3"
    exit 1
}

without() {
    echo "stageout: $1; output of jobs is uploaded by the jobs themselves"
    "$error_gen" -ok "$name" "stageout" "absent"
    exit 0
}

pyz=
for key in GLIDECLIENT_GROUP_WORK_DIR GLIDECLIENT_WORK_DIR GLIDEIN_ENTRY_WORK_DIR GLIDEIN_WORK_DIR; do
    directory=$(gconfig_get "$key" "$glidein_config")
    if [ -n "$directory" ] && [ -f "$directory/stageout-pilot.pyz" ]; then
        pyz=$directory/stageout-pilot.pyz
        break
    fi
done
[ -n "$pyz" ] || fail Config "stageout-pilot.pyz is not among the files of this glidein" "missing"

# Where the glidein runs: HTCondor's LOCAL_DIR, whose condor_config.d it reads last.
work=$(cd "$(dirname "$glidein_config")" && pwd)
home=$work/stageout_pilot
mkdir -p "$home" "$work/condor_config.d" || fail WN_Resource "cannot write in $work" "mkdir"
# A copy, because it unpacks beside itself.
install -m 0755 "$pyz" "$home/stageout-pilot.pyz" || fail WN_Resource "cannot copy $pyz" "install"
problem=$("$home/stageout-pilot.pyz" links "$home/bin" 2>&1) || without "$problem"
site=$(echo "$home"/.stageout-pilot/*-cp*)

cat >"$work/condor_config.d/10-stageout-site.conf" <<EOF || fail WN_Resource "cannot write in $work/condor_config.d" "cat"
STAGEOUT_BIN = $home/bin
SANDBOX_MANAGER_ENVIRONMENT = "PYTHONPATH=\$(RELEASE_DIR)/lib/python3"
EOF
cp "$site"/condor_config.d/*.conf "$work/condor_config.d/" || fail WN_Resource "cannot write configuration" "cp"

# For monitoring: in the slot ads, and in the environment of nobody.
gconfig_add STAGEOUT_VERSION "$("$home/bin/stageout" --version | cut -d ' ' -f 2)"
add_condor_vars_line STAGEOUT_VERSION S - + N Y -
"$error_gen" -ok "$name" "stageout" "$home"
exit 0
