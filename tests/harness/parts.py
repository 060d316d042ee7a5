"""The parts of the product that can be left out, and copies of the repository without one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Part -> its files and directories in the repository, beside its tests.
PARTS: dict[str, tuple[str, ...]] = {
    "streams": (
        "policy_service",
        "stageout/tuning",
        "stageout/sampling",
        "stageout/cli/estimate.py",
        "stageout/cli/profile.py",
    ),
    "web": ("stageout_web",),
    "kit": ("stageout/testing",),
}

#: Read at the start of each Python in a copy: an installation that can be edited would find the missing part elsewhere.
_SITE = """
import sys

sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
"""


def modules_of(part: str) -> list[str]:
    """Return the names by which a part is imported."""
    return [path.removesuffix(".py").replace("/", ".") for path in PARTS[part]]


def copy_without(part: str, tree: Path) -> None:
    """Copy the repository's files, those that git does not know yet included, but not those of a part."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, tree / name
        is_of_part = any(name == path or name.startswith(f"{path}/") for path in PARTS[part])
        if is_of_part or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    (tree / "sitecustomize.py").write_text(_SITE)
