"""The stored answer to -classad: the same as Python's in every environment, printed only while it holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sandbox_manager.delivery.stored_answers import StoredAnswers
from stageout.core import stored_answer

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted(path.name for path in (ROOT / "plugins").glob("*_plugin"))
OTHERS_UID = 64001
PROXIES = [name for name in stored_answer.VARIABLES if name.endswith("_proxy")]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of somebody else")


class Site:
    """An installation in a directory of its own, as pip makes it: programs that know their interpreter, and modules."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.package = folder / "lib" / "stageout"
        for part in ("core", "plugin", "protocols"):
            shutil.copytree(ROOT / "stageout" / part, self.package / part, ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copy(ROOT / "stageout" / "__init__.py", self.package)
        self.plugin = self.bin / name
        shutil.copy(ROOT / "plugins" / name, self.plugin)
        self.command("stageout", f"#!{sys.executable}\n")
        self.command("globus-url-copy", "#!/bin/sh\n")
        self.environment = {"PYTHONPATH": str(folder / "lib"), "PATH": f"{self.bin}:/usr/bin:/bin"}

    def command(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def ask(self, plugin: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run([plugin, *arguments], env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def store(self) -> Path:
        """Store the answer, with a version by which it is known from Python's."""
        stored_answer.write(self.plugin, self.environment, self.ask)
        path = stored_answer.path_of(self.plugin)
        text = path.read_text()
        assert text.count("\nPluginVersion = ") == 1
        path.write_text(text.replace('\nPluginVersion = "', '\nPluginVersion = "stored'))
        return path

    def answer(self, shell: str = "", **changes: str) -> tuple[str, bool]:
        """Return the plugin's answer without the mark, and whether it was the stored one."""
        command = [shell] if shell else []
        environment = {**self.environment, **changes}
        done = subprocess.run(
            [*command, self.plugin, "-classad"], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.replace('"stored', '"'), '"stored' in done.stdout

    def python(self, **changes: str) -> str:
        """Return Python's answer in this environment."""
        command = [sys.executable, str(self.plugin), "-classad"]
        environment = {**self.environment, **changes}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site", "stageout_curl_plugin")


@pytest.mark.parametrize(("name", "shell"), [*((name, "sh") for name in OURS), (OURS[-1], "bash"), (OURS[-1], "dash")])
def test_both_answers_are_the_same_in_every_environment(tmp_path: Path, name: str, shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    site = Site(tmp_path / "site", name)
    shells = f"/bin/{shell}"
    for stored_in in ({}, {"http_proxy": "http://cache:3128", "https_proxy": "it's $HOME `id` \\ \""}):
        site.environment.update(stored_in)
        site.store()
        assert site.answer(shells) == (site.python(), True)
        assert site.answer(shells, HOME="/nowhere", LC_ALL="C", STAGEOUT_CURL_X="1", own="x", seen="y")[1]
        for variable in stored_answer.VARIABLES:
            value = "/usr/local/bin:/usr/bin:/bin" if variable == "PATH" else "http://other:1"
            if variable.startswith("PYTHON"):
                continue
            found, stored = site.answer(shells, **{variable: value})
            assert (found, stored) == (site.python(**{variable: value}), False), variable
        for changes in (
            {"http_proxy": "http://user:word@cache:1"},
            {"dav_proxy": "two\nlines"},
            {"http_proxy": "", "https_proxy": "http://cache:3128"},
            {"PYTHONPATH": f"{site.environment['PYTHONPATH']}:/nowhere"},
        ):
            found, stored = site.answer(shells, **changes)
            assert (found, stored) == (site.python(**changes), False), changes


def test_all_that_answers_read_of_the_environment_is_compared() -> None:
    """A variable that an answer reads without being compared would be answered wrongly."""
    code = """
import os, sys
class Seen(dict):
    def __getitem__(self, name): names.add(name); return dict.__getitem__(self, name)
    def get(self, name, default=None): names.add(name); return dict.get(self, name, default)
    def __contains__(self, name): names.add(name); return dict.__contains__(self, name)
names = set()
os.environ = Seen(os.environ)
os._exit = lambda status: (print(*names, file=sys.stderr), sys.exit(status))
sys.argv[1:] = ["-classad"]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""
    for name in OURS:
        command = [sys.executable, "-c", f"import sys; sys.argv[0] = {str(ROOT / 'plugins' / name)!r}\n{code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        read = set(done.stderr.split())
        assert read <= set(stored_answer.VARIABLES), name
        assert "curl" not in name or set(PROXIES) <= read, "the test sees nothing"


def test_a_change_of_anything_that_counts_asks_python(site: Site) -> None:
    answer = site.store()
    sources = answer.read_text().splitlines()[0].split()[1:]
    assert sys.executable in sources and str(site.bin / "stageout") in sources
    modules = {Path(path) for path in sources if path.startswith(str(site.package))}
    assert {path.name for path in modules} == {"__init__.py", "abilities.py", "classads.py", "query.py"}
    for path in (site.plugin, site.bin / "stageout", *modules):
        held = path.stat()
        content = path.read_bytes()
        aside = path.with_name("aside")
        aside.write_bytes(content)
        aside.chmod(held.st_mode)
        os.utime(aside, ns=(held.st_atime_ns, held.st_mtime_ns))
        aside.replace(path)  # same bytes, same time: an upgrade of packages may look like that
        assert site.answer() == (site.python(), False), path
        assert not stored_answer.is_fresh(site.plugin, site.environment)
        site.store()
        assert site.answer() == (site.python(), True), path


def test_a_new_version_answers_for_itself(site: Site) -> None:
    site.store()
    version = site.package / "__init__.py"
    version.write_text('__version__ = "9.9"\n')
    found, stored = site.answer()
    assert 'PluginVersion = "9.9"' in found and not stored


def test_without_its_modules_a_plugin_answers_nothing(site: Site) -> None:
    """HTCondor must not send jobs to a plugin that cannot run."""
    site.store()
    (site.package / "plugin" / "query.py").unlink()
    done = subprocess.run([site.plugin, "-classad"], env=site.environment, capture_output=True, text=True)
    assert done.returncode != 0 and "SupportedMethods" not in done.stdout


@pytest.mark.parametrize("text", ["", "\n", "# \n", "#\n# x\n", "exit 3\n", "echo hello\n", "\0\0", "( {\n"])
def test_an_answer_that_is_broken_asks_python(site: Site, text: str) -> None:
    if "exit" in text or "echo" in text or "(" in text:
        pytest.skip("root's own file is believed")
    site.store().write_text(text)
    assert site.answer() == (site.python(), False)


@needs_root
@pytest.mark.parametrize("kind", ["owner", "group may write", "others may write", "link", "fifo", "folder", "secret"])
def test_an_answer_of_somebody_who_may_not_is_not_run(site: Site, kind: str) -> None:
    answer = site.store()
    forged = answer.read_text().replace("printf", "touch /tmp/never; printf")
    answer.unlink()
    if kind == "fifo":
        os.mkfifo(answer, 0o644)
    elif kind == "folder":
        answer.mkdir(0o755)
    elif kind == "link":
        real = site.folder / "real"
        real.write_text(forged)
        os.chown(real, OTHERS_UID, OTHERS_UID)
        answer.symlink_to(real)
    else:
        answer.write_text(forged)
        answer.chmod({"group may write": 0o664, "others may write": 0o646, "secret": 0o600}.get(kind, 0o644))
        if kind == "owner":
            os.chown(answer, OTHERS_UID, OTHERS_UID)
    assert site.answer() == (site.python(), False)


@needs_root
def test_the_answer_of_another_plugin_is_not_printed(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path / "other", "gsiftp_plugin")
    os.link(other.store(), stored_answer.path_of(site.plugin))
    assert site.answer() == (site.python(), False)


def test_it_is_not_stored_where_others_may_write(site: Site) -> None:
    site.bin.chmod(0o777)
    with pytest.raises(stored_answer.CannotStore, match="others may write"):
        site.store()
    assert not stored_answer.path_of(site.plugin).exists()


def test_a_plugin_that_lacks_something_is_asked_every_time(tmp_path: Path) -> None:
    """The missing program may be there the next time."""
    site = Site(tmp_path / "site", "gsiftp_plugin")
    program = site.bin / "globus-url-copy"
    site.store()
    program.unlink()
    assert site.answer() == (site.python(), False)
    if not shutil.which(program.name, path=site.environment["PATH"]):
        with pytest.raises(stored_answer.CannotStore):
            site.store()


# ---- the interpreter -------------------------------------------------------------------------------------------------


def test_the_interpreter_is_that_of_the_command_beside_the_plugin(site: Site) -> None:
    other = site.command(
        "python3.99", f"#!/bin/sh\nexec {sys.executable} -c \"print('other', *__import__('sys').argv)\"\n"
    )
    site.command("stageout", f"#!{other}\nimport sys\n")
    assert site.answer()[0].startswith("other")
    site.command("stageout", '#!/bin/sh\n\'\'\'exec\' "/a path/python" "$0" "$@"\n')  # pip's form for long paths
    site.command("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert "SupportedMethods" in site.answer()[0]


def test_a_link_to_the_plugin_finds_the_interpreter(site: Site, tmp_path: Path) -> None:
    site.store()
    link = tmp_path / site.plugin.name
    link.symlink_to(site.plugin)
    asked = subprocess.run(
        [link, "-classad"], env={**site.environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert 'SupportedMethods = "http' in asked.stdout and asked.stderr == ""


def test_beside_no_command_the_interpreter_is_that_of_the_path(site: Site) -> None:
    (site.bin / "stageout").unlink()
    site.command("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n').rename(site.folder / "python3")
    assert "SupportedMethods" in site.answer(PATH=f"{site.folder}:/usr/bin:/bin")[0]


def test_all_heads_are_the_same_and_sound(tmp_path: Path) -> None:
    heads = {name: (ROOT / "plugins" / name).read_text().partition("'''\n\n")[0] for name in OURS}
    assert len(set(heads.values())) == 1
    head = tmp_path / "head"
    head.write_text(heads[OURS[0]])
    # The answer is split into words on purpose, and it is run from a descriptor.
    command = ["shellcheck", "-s", "sh", "-e", "SC2086,SC1091", head]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout


# ---- the manager -----------------------------------------------------------------------------------------------------


def test_the_manager_stores_what_has_changed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", site.environment["PYTHONPATH"])
    # Nobody else reaches the directories of pytest.
    monkeypatch.setattr("stageout.movers.plugins_table._unprivileged", lambda: (os.geteuid(), os.getegid()))
    answers, answer = StoredAnswers(), stored_answer.path_of(site.plugin)
    foreign = site.command("box_plugin", "#!/bin/sh\necho 'SupportedMethods = \"box\"'\n")
    paths = [str(site.plugin), str(foreign), str(site.bin / "missing")]
    answers.renew(paths)
    first = answer.stat()
    assert first.st_mode & 0o777 == 0o644 and not stored_answer.path_of(foreign).exists()
    answers.renew(paths)
    assert answer.stat().st_ino == first.st_ino, "it was fresh"
    os.utime(site.plugin)
    answers.renew(paths)
    assert answer.stat().st_ino != first.st_ino
    assert stored_answer.is_fresh(site.plugin, os.environ)


def test_an_answer_that_cannot_be_stored_is_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.bin.chmod(0o777)
    answers = StoredAnswers()
    for _ in range(2):
        answers.renew([str(site.plugin)])
    assert caplog.text.count("plugin-answer-not-stored") == 1
    answers.forget()
    answers.renew([str(site.plugin)])
    assert caplog.text.count("plugin-answer-not-stored") == 2


def test_the_doctor_sees_why_an_answer_is_not_used(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", OURS[0])
    plugin = str(site.plugin)
    with pytest.raises(FileNotFoundError):
        stored_answer.trouble(plugin, "", os.stat)
    path = site.store()
    assert stored_answer.trouble(plugin, path.read_text(), os.stat) == ""
    assert stored_answer.trouble(plugin, "", os.stat).startswith("is out of date")
    path.chmod(0o664)
    assert "others may write it" in stored_answer.trouble(plugin, path.read_text(), os.stat)
    path.chmod(0o644)
    module = next(site.package.rglob("query.py"))
    text = module.read_text()
    module.write_text(f"{text}# another release\n")
    assert "has changed" in stored_answer.trouble(plugin, path.read_text(), os.stat)
    module.unlink()
    assert stored_answer.trouble(plugin, path.read_text(), os.stat) == f"is out of date: {module} is gone"


@needs_root
def test_an_answer_of_somebody_else_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", OURS[0])
    path = site.store()
    os.chown(path, OTHERS_UID, OTHERS_UID)
    assert "somebody else" in stored_answer.trouble(str(site.plugin), path.read_text(), os.stat)
