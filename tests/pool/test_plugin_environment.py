"""Variables of starter and job that reach a transfer plugin, by version of HTCondor. The product takes no part."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.pool.conftest import open_directory

pytestmark = pytest.mark.pool

#: Writes its environment into the file that it is asked for, or beside itself when it is asked to upload.
_PLUGIN = r"""#!/usr/bin/python3
import json, os, re, sys
name = os.path.basename(__file__).partition("_")[0]
if "-classad" in sys.argv:
    print('MultipleFileSupport = true\nProtocolVersion = 4\nPluginVersion = "1"\nPluginType = "FileTransfer"')
    print('SupportedMethods = "%sd"' % name)
    sys.exit(0)
said = open(sys.argv[sys.argv.index("-infile") + 1]).read()
upload = "-upload" in sys.argv
with open(sys.argv[sys.argv.index("-outfile") + 1], "w") as out:
    for ad in re.findall(r"\[.*?\]", said, re.S):
        local, url = (re.search(key + ' = "([^"]*)"', ad) for key in ("LocalFileName", "Url"))
        if local and url:
            seen = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seen", name + ".up")
            with open(seen if upload else local[1], "w") as told:
                json.dump({**os.environ, "job's ad": open(os.environ["_CONDOR_JOB_AD"]).read()}, told)
            facts = (local[1], url[1], name, "upload" if upload else "download")
            out.write('[ TransferSuccess = true; TransferFileName = "%s"; TransferUrl = "%s"; '
                      'TransferProtocol = "%sd"; TransferType = "%s"; TransferFileBytes = 1; '
                      'TransferTotalBytes = 1; TransferStartTime = 1; TransferEndTime = 2; '
                      'ConnectionTimeSeconds = 0.1 ]\n' % facts)
"""
_STARTD = 'STARTD_ENVIRONMENT = "CURL_MAX_RETRY_ATTEMPTS=3 SSL_CERT_FILE=/site/ca.pem CURL_SITE=yes"\n'
_JOB = """
executable = /bin/sh
arguments = "-c 'cat curl.env site.env; echo x > up; echo x > up2'"
environment = "CURL_MAX_RETRY_ATTEMPTS=7 CURL_CA_BUNDLE=/job/ca.pem Curl_Mixed=1 SSL_CERT_FILE=/job/ca.pem {more}"
transfer_input_files = curld://h/curl.env, sited://h/site.env
transfer_output_files = up, up2
transfer_output_remaps = "up = curld://h/up; up2 = sited://h/up2"
output = job.out
request_disk = 10M
queue
"""
_MORE = "X509_CERT_DIR=/job/certs X509_USER_PROXY=/job/proxy STAGEOUT_SPLIT_BYTES=1 http_proxy=http://job:1 SITE_X=1"


@pytest.mark.parametrize(("version", "passes"), [("25.14", True), ("23.9", False)])
def test_variables_with_the_plugin_s_name_come_from_the_job(stageout_pools: Any, version: str, passes: bool) -> None:
    with open_directory("environment") as shared:
        for name in ("curl", "site"):
            plugin = shared / f"{name}_plugin"
            plugin.write_text(_PLUGIN)
            plugin.chmod(0o755)
        (shared / "seen").mkdir()
        (shared / "seen").chmod(0o1777)
        plugins = f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {shared}/curl_plugin, {shared}/site_plugin\n"
        options = {"stageout": False, "agent": False, "manager": False, "execute_points": 1, "binds": (shared,)}
        with stageout_pools(version=version, ep_config=_STARTD + plugins, **options) as pool:
            job = pool.submit("alice", _JOB.format(more=_MORE))
            pool.wait(lambda: pool.history(job), timeout_s=120, what="the job's end")
            decoder, text = json.JSONDecoder(), (job.dir / "job.out").read_text().strip()
            curl, end = decoder.raw_decode(text)
            site = json.loads(text[end:])
            for seen in (curl, json.loads((shared / "seen" / "curl.up").read_text())):
                _check(seen, passes)
            for seen in (site, json.loads((shared / "seen" / "site.up").read_text())):
                assert seen["CURL_MAX_RETRY_ATTEMPTS"] == "3"
                assert ("SITE_X" in seen) == passes
                assert "CURL_CA_BUNDLE" not in seen


def _check(seen: dict[str, str], passes: bool) -> None:
    assert re.search(r'^Environment = ".*\bCURL_MAX_RETRY_ATTEMPTS=7\b', seen["job's ad"], re.MULTILINE)
    assert seen["CURL_SITE"] == "yes"
    assert seen["CURL_MAX_RETRY_ATTEMPTS"] == ("7" if passes else "3")
    assert ("CURL_CA_BUNDLE" in seen, "Curl_Mixed" in seen) == (passes, passes)
    assert seen["SSL_CERT_FILE"] == "/site/ca.pem"
    assert not {"X509_CERT_DIR", "X509_USER_PROXY", "STAGEOUT_SPLIT_BYTES", "http_proxy", "SITE_X"} & set(seen)
