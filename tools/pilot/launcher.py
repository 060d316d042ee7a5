"""Start of the single file: finds its programs unpacked, or unpacks them, and becomes the one that was asked for.

The file is a zip archive with this module as ``__main__``. The file is for several versions of Python. The first start
with one of them unpacks the packages for that version into a cache, and every later start only looks there. Nothing but
``os`` and ``sys`` is imported on that way: the plugin is in every job's way.
"""

import os
import sys

BUILD = "@BUILD@"
ENVIRONMENT = "STAGEOUT_PILOT_CACHE"


def main():
    """Be a program: the one that the file (or a link to it) is called, else the first argument."""
    archive = os.path.abspath(sys.argv[0])
    name = os.path.basename(archive)
    root = site(archive)
    programs = os.path.join(root, "programs")
    if not os.path.isfile(os.path.join(programs, name)):
        del sys.argv[0]
        name = sys.argv[0] if sys.argv else ""
        if name == "links":
            return make_links(os.path.realpath(archive), programs, sys.argv[1:])
        if not name or os.path.basename(name) != name or not os.path.isfile(os.path.join(programs, name)):
            return usage(os.path.basename(archive), programs)
        # A plugin is known to its manager by its path: what stands in FILETRANSFER_PLUGINS must be a link.
        sys.argv[0] = os.path.join(programs, name)
    sys.path[0] = root
    with open(os.path.join(programs, name), encoding="utf-8") as stream:
        code = compile(stream.read(), name, "exec")
    exec(code, {"__name__": "__main__", "__file__": os.path.join(programs, name)})
    return 0


def site(archive):
    """Directory with the programs for this Python, unpacked when it is not there yet."""
    wanted = f"{BUILD}-cp{sys.version_info[0]}{sys.version_info[1]}"
    refused = []
    for parent in caches(archive):
        ready = os.path.join(parent, wanted)
        try:
            if not os.path.isdir(ready):
                unpack(archive, parent, wanted)
            if is_trusted(parent) and is_trusted(ready):
                return ready
            refused.append(f"{parent}: others may write there")
        except OSError as problem:
            refused.append(f"{parent}: {problem.strerror}")
    return sys.exit(
        f"stageout: nowhere to unpack to ({'; '.join(refused)}); set {ENVIRONMENT} to a directory of your own"
    )


def is_trusted(directory):
    """Can nobody but root and ourselves change what is in it? Others may write below /tmp."""
    facts = os.lstat(directory)
    return facts.st_uid in (0, os.geteuid()) and not facts.st_mode & 0o022


def unpack(archive, parent, wanted):
    """Cold start. :raises OSError: it cannot be written there."""
    if os.path.lexists(parent) and not is_trusted(parent):
        return
    sys.path.append(archive)
    import unpack

    try:
        unpack.unpack(os.path.realpath(archive), parent, wanted)
    except unpack.Refused as problem:
        sys.exit(f"stageout: {problem}")


def caches(archive):
    """Where to look, best first: what the operator says, beside the file, the temporary directory."""
    said = os.environ.get(ENVIRONMENT)
    if said:
        return [said]
    beside = os.path.join(os.path.dirname(os.path.realpath(archive)), ".stageout-pilot")
    temporary = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"stageout-pilot-{os.geteuid()}")
    return [beside, temporary]


def make_links(archive, programs, arguments):
    """``links DIRECTORY``: one link to this file for each program."""
    if len(arguments) != 1:
        sys.exit(f"usage: {os.path.basename(archive)} links DIRECTORY")
    os.makedirs(arguments[0], exist_ok=True)
    for name in sorted(os.listdir(programs)):
        aside = os.path.join(arguments[0], f".{name}.{os.getpid()}")
        os.symlink(archive, aside)
        os.replace(aside, os.path.join(arguments[0], name))
    return 0


def usage(name, programs):
    """The roles of the file."""
    sys.stderr.write(f"usage: {name} PROGRAM [ARGUMENTS], or call it by a link with the program's name\n")
    sys.stderr.write(f"programs: {' '.join(sorted(os.listdir(programs)))}\n")
    sys.stderr.write("          links DIRECTORY (makes the links)\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
