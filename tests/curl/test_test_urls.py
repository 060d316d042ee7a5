"""``<SCHEME>_TEST_URL``: HTCondor asks for it at each start of a job; one try, and seconds of silence at most."""

from __future__ import annotations

import socket

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import Wanted

#: The defaults, with which everything else is tried for minutes.
PATIENT = {
    "STAGEOUT_CONNECT_TIMEOUT_S": "30",
    "STAGEOUT_STALL_WINDOW_S": "30",
    "STAGEOUT_RESPONSE_TIMEOUT_S": "300",
    "STAGEOUT_RETRY_BUDGET_S": "10",
}


def test_one_try(plugin):
    """No connection: HTCondor's own plugin tries that for minutes, and so do we for a job's file."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        result = plugin.get(f"http://127.0.0.1:{taken.getsockname()[1]}/x", "test_file", env=PATIENT)
    assert result.failures == [K.CONNECT_FAILED]
    assert result.run.duration_s < 10


def test_silence(plugin):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        result = plugin.get(f"http://127.0.0.1:{mute.getsockname()[1]}/x", "test_file", env=PATIENT)
    assert result.failures == [K.STALLED]
    assert result.run.duration_s < 15


@pytest.mark.parametrize("wanted", [True, False])
def test_file_of_that_name_of_a_job(plugin, door, wanted):
    """A job that asks for the URL has all patience."""
    from tests.curl.interposer import status

    door.next("GET", status(503), status(503), status(404))
    plugin.new_scratch()
    job = {"TransferInput": f"other,{door.url('x')}"} if wanted else {"TransferInput": "other"}
    result = plugin.call([Wanted(door.url("x"), "test_file")], upload=False, job=job, env=PATIENT)
    assert result.kind is (K.NOT_FOUND if wanted else K.SERVER_BUSY)
