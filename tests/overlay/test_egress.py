"""Names of a gateway that a transfer plugin delivers to a real web server, whatever happens in between."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overlay_router.report import EGRESS_NAME, shown
from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.fetch import get, read
from stageout.overlay.key_file import read_key
from stageout.overlay.many import put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.wire.messages import BLOCK_BYTES
from stageout.testing.starter import installed
from tests.harness.destination import Destination
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess

_PLUGIN = Path(__file__).parents[2] / "plugins" / "stageout_curl_plugin"


@pytest.fixture(scope="module")
def server() -> Iterator[Destination]:
    """A directory that its own user can reach: pytest's directories are root's alone."""
    with tempfile.TemporaryDirectory() as place, Destination(Path(place)) as running:
        yield running


@pytest.fixture(scope="module")
def lessor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """It says which gateway delivers."""
    with RouterProcess(tmp_path_factory.mktemp("lessor")) as running:
        yield running


@pytest.fixture(scope="module")
def make_gateway(
    server: Destination, lessor: RouterProcess, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], RouterProcess]:
    plugin = installed(_PLUGIN, tmp_path_factory.mktemp("plugin"))
    settings = {
        "STAGEOUT_ROUTER_EGRESS": f"/out={server.url('base')}", "FILETRANSFER_PLUGINS": str(plugin),
        "STAGEOUT_ROUTER_EGRESS_LEASES": lessor.address, "STAGEOUT_ROUTER_KEY": str(lessor.key_file("hop")),
    }  # fmt: skip
    return lambda: RouterProcess(tmp_path_factory.mktemp("gateway"), settings)


@pytest.fixture(scope="module")
def router(make_gateway: Callable[[], RouterProcess]) -> Iterator[RouterProcess]:
    with make_gateway() as running:
        yield running


@pytest.fixture
def gateway(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)


def make(path: Path, size_bytes: int) -> Path:
    path.write_bytes(os.urandom(size_bytes))
    return path


def _freed(router: RouterProcess) -> None:
    staging, movers = router.home / "records/egress/.stageout/staging", router.home / "records/movers"
    wait_until(lambda: not any(staging.iterdir()) and not any(movers.iterdir()), what="the spool to be empty")


class _Putting:
    """A put in a thread."""

    def __init__(self, gateway: Gateway, source: Path, path: str) -> None:
        self.outcome: list[Put | TransferFailure] = []
        self._thread = threading.Thread(target=self._run, args=(gateway, source, path))
        self._thread.start()

    def _run(self, gateway: Gateway, source: Path, path: str) -> None:
        try:
            self.outcome.append(put(gateway, source, path))
        except TransferFailure as failure:
            self.outcome.append(failure)

    def end(self) -> Put | TransferFailure:
        self._thread.join(60)
        return self.outcome[0]


def _said(router: RouterProcess, words: str, action: Callable[[], object]) -> None:
    """Do something and wait until the router has said words that it had not before."""
    before = router.log.count(words)
    action()
    wait_until(lambda: router.log.count(words) > before, timeout_s=60, what=words, describe=lambda: router.log[-3000:])


def test_killed_in_the_middle_it_delivers_all_the_same(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", 3 * BLOCK_BYTES + 17)
    server.pause()
    putting: list[_Putting] = []
    _said(router, " delivery-started ", lambda: putting.append(_Putting(gateway, source, "out/a dir/f%")))
    wait_until(lambda: any((router.home / "records/movers").glob("*/*")), what="the plugin to be run")
    router.kill()
    assert not putting[0].outcome, "nothing is said before the plugin has verified it"
    router.start()
    assert not putting[0].outcome
    server.resume()
    done = putting[0].end()
    assert isinstance(done, Put), done
    assert server.file("base/a dir/f%").read_bytes() == source.read_bytes()
    _freed(router)


def test_two_gateways_never_deliver_one_name_at_once(
    router: RouterProcess,
    make_gateway: Callable[[], RouterProcess],
    gateway: Gateway,
    server: Destination,
    tmp_path: Path,
) -> None:
    first, second = (make(tmp_path / name, 50_000) for name in "12")
    with make_gateway() as other:
        server.pause()
        puts: list[_Putting] = []
        _said(router, " delivery-started ", lambda: puts.append(_Putting(gateway, first, "out/one")))
        wait_until(lambda: any((router.home / "records/movers").glob("*/*")), what="the plugin to be run")
        there = dataclasses.replace(gateway, port=other.port)
        _said(other, "another gateway delivers there", lambda: puts.append(_Putting(there, second, "out/one")))
        assert not any((other.home / "records/movers").iterdir())
        server.resume()
        assert [type(one.end()) for one in puts] == [Put, Put]
        assert server.file("base/one").read_bytes() == second.read_bytes()


def test_what_the_server_refuses_is_told_and_what_it_cannot_take_now_waits(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", 100_000)
    server.refuse("not yours")
    with pytest.raises(TransferFailure, match="http:") as caught:
        put(gateway, source, "out/refused")
    assert caught.value.kind is ErrorClass.PERMISSION_DENIED
    server.accept()
    server.stop()
    putting: list[_Putting] = []
    _said(router, " delivery-failed ", lambda: putting.append(_Putting(gateway, source, "out/late")))
    report = router.home / "records" / EGRESS_NAME
    wait_until(lambda: f"{server.url('base')}: " in shown(report, 0), what="the reason in the report")
    assert "out/late" in shown(report, 0)
    server.start_again()
    assert isinstance(putting[0].end(), Put)
    assert server.file("base/late").read_bytes() == source.read_bytes()
    assert not server.file("base/refused").exists()
    _freed(router)


def test_small_files_for_a_plugin_and_for_the_tree_go_together(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path
) -> None:
    names = ["here/f", *(f"out/many/{number}" for number in range(5)), "here/g", "out/f"]
    files = [(name, make(tmp_path / name.replace("/", "-"), 50), name) for name in names]
    ended: dict[str, object] = {}
    put_many(gateway, files, lambda key, result: ended.__setitem__(key, result))
    assert {type(result) for result in ended.values()} == {SmallPut}
    assert set(ended) == set(names)
    for _, local, name in files:
        there = router.root / name if name.startswith("here") else server.file(name.replace("out", "base", 1))
        assert there.read_bytes() == local.read_bytes()
    _freed(router)


def test_a_pack_is_delivered_by_few_calls_also_by_a_gateway_that_was_killed(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path
) -> None:
    files = [(f"out/pack/{number}", make(tmp_path / str(number), 200 + number)) for number in range(60)]
    ended: dict[str, object] = {}

    def send() -> None:
        put_many(gateway, ((name, local, name) for name, local in files), ended.__setitem__)

    server.pause()
    sending = threading.Thread(target=send)
    _said(router, "path=out/pack/59", sending.start)
    wait_until(lambda: any((router.home / "records/movers").glob("*/*")), what="the plugin to be run")
    (movers,) = [one for one in (router.home / "records/movers").iterdir() if one.is_dir()]
    assert movers, "one call for all of them"
    router.kill()
    router.start()
    assert not ended
    server.resume()
    sending.join(60)
    assert {name for name, end in ended.items() if isinstance(end, SmallPut)} == {name for name, _ in files}
    for name, local in files:
        assert server.file(name.replace("out", "base", 1)).read_bytes() == local.read_bytes()
    _freed(router)


def test_names_there_cannot_be_listed_or_changed(router: RouterProcess, gateway: Gateway) -> None:
    with Session(gateway) as session:
        for ask in (lambda: session.stat("out/unknown"), lambda: list(session.entries("out"))):
            with pytest.raises(TransferFailure, match="look at http:") as caught:
                ask()
            assert caught.value.kind is ErrorClass.NOT_SUPPORTED
        session.mkdir("out/d")
        with pytest.raises(TransferFailure, match="mkdir cannot be done"):
            session.push()


def test_what_is_there_is_fetched_anew_for_who_asks(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, back = make(tmp_path / "source", 2 * BLOCK_BYTES + 5), tmp_path / "back"
    put(gateway, source, "out/back/f", mode=0o640)
    key = ["--key", str(router.key_file("site"))]
    url = f"overlay://127.0.0.1:{router.port}/out/back/f"
    assert main(["stat", url, *key]) == 0
    assert "known:      delivered by this gateway, not looked up at http:" in capsys.readouterr().out
    copied = f"overlay://127.0.0.1:{router.port}/here/copied"
    assert main(["copy", url, copied, *key]) == 0
    assert (router.root / "here/copied").read_bytes() == source.read_bytes()
    with Session(gateway) as session:
        entry = session.stat("out/back/f")
    assert (entry.kind, entry.size_bytes, entry.mode) == ("file", 2 * BLOCK_BYTES + 5, 0o640)
    assert "not looked up at http:" in entry.note
    assert get(gateway, "out/back/f", back) == entry.size_bytes
    assert back.read_bytes() == source.read_bytes()
    assert "as_delivered=True" in router.log
    tail = b"".join(read(gateway, "out/back/f", offset=BLOCK_BYTES + 1, generation=entry.generation))
    assert tail == source.read_bytes()[BLOCK_BYTES + 1 :], "that version is the one that was delivered"
    server.file("base/back/f").write_bytes(b"changed by somebody else")
    _said(router, "delivered-file-changed", lambda: get(gateway, "out/back/f", back))
    assert back.read_bytes() == b"changed by somebody else"
    with pytest.raises(TransferFailure) as caught:
        list(read(gateway, "out/back/f", generation=entry.generation + 1))
    assert caught.value.kind is ErrorClass.CONFLICT
    with pytest.raises(TransferFailure, match="http:") as caught:
        get(gateway, "out/back/none", back)
    assert caught.value.kind is ErrorClass.NOT_FOUND


def test_who_asks_at_once_shares_a_fetch_that_began_after_that(
    router: RouterProcess, gateway: Gateway, server: Destination, tmp_path: Path
) -> None:
    file = server.file("base/shared")
    file.write_bytes(os.urandom(BLOCK_BYTES + 1))
    server.pause()
    before = router.log.count(" fetch-started ")
    ended: list[int] = []

    def ask(number: int) -> None:
        ended.append(get(gateway, "out/shared", tmp_path / f"shared{number}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    _said(router, " fetch-started ", threads[0].start)
    for thread in threads[1:]:
        thread.start()
    server.resume()
    for thread in threads:
        thread.join(60)
    assert ended == [BLOCK_BYTES + 1] * 9
    assert {(tmp_path / f"shared{number}").read_bytes() for number in range(9)} == {file.read_bytes()}
    assert 2 <= router.log.count(" fetch-started ") - before <= 3
