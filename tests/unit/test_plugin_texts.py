"""URLs and messages: taken apart, made safe, encoded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageout.core.classad_parser import parse_ad
from stageout.plugin.context import PluginLog
from stageout.plugin.text import Scrubber, one_line, recordable, recorded
from stageout.plugin.urls import as_written, bare_url, encode_url, host_of, is_url, safe_url, split_scheme
from stageout.testing.starter import method_of


@pytest.mark.parametrize(
    ("url", "method", "service", "handle"),
    [
        ("https://h/p", "https", "", ""),
        ("HTTPS://h", "https", "", ""),
        ("cred+https://h", "https", "cred", ""),
        ("cred.hdl+https://h", "https", "cred", "hdl"),
        ("my-store://h", "store", "", ""),
        ("stage.v2://h", "v2", "", ""),
        ("a+b.c+dav://h", "dav", "a+b", "c"),
    ],
)
def test_schemes(url, method, service, handle):
    assert split_scheme(url) == (method, service, handle)
    assert method_of(url) == method
    assert bare_url(url) == method + url[url.index("://") :]


@pytest.mark.parametrize("text", ["", "x", "/a/b", "http:/x", "http://", "1http://x", "://x", "C:\\x"])
def test_not_urls(text):
    assert not is_url(text)
    with pytest.raises(ValueError, match="not a URL"):
        split_scheme(text)


def test_safe_url():
    assert safe_url("svc+https://user:pw@host.org:80/a/b@c?token=1#f") == "svc+https://host.org:80/a/b@c"
    assert safe_url("https://host?x=1") == "https://host"
    assert safe_url("/local/file?x") == "/local/file?x"
    assert host_of("https://u:p@h:1/x") == "h:1"
    assert host_of("file:///x") == ""


@given(st.text(st.characters(exclude_characters="/?#@", exclude_categories=("Cs",)), min_size=1))
def test_safe_url_never_keeps_userinfo_or_query(secret):
    marked = f"SECRET{secret}SECRET"
    assert "SECRET" not in safe_url(f"https://{marked}@host/path?{marked}#{marked}")


@pytest.mark.parametrize(
    ("url", "destination", "encoded"),
    [
        ("https://h/d/a b", "https://h/d", "https://h/d/a%20b"),
        ("https://h/d/a%20b", "https://h/d/", "https://h/d/a%2520b"),
        ("https://h/d/x#y?z", "https://h/d/", "https://h/d/x%23y%3Fz"),
        ("https://h/my%20dir/a%", "https://h/my%20dir", "https://h/my%20dir/a%25"),
        ("https://h/d/sub/f\u00e9", "https://h/d", "https://h/d/sub/f%C3%A9"),
        ("https://h/d?tok=1&x=2/a#b", "https://h/d?tok=1&x=2", "https://h/d/a%23b?tok=1&x=2"),
        ("https://h/remap%20ped?x=1", "", "https://h/remap%20ped?x=1"),
        ("https://h/remap ped%zz", "", "https://h/remap%20ped%25zz"),
        ("https://h/other/a%20b", "https://h/d", "https://h/other/a%20b"),
        ("https://[::1]:8443/a", "", "https://[::1]:8443/a"),
        ("https://h/d/\udcff", "https://h/d", "https://h/d/%FF"),
    ],
)
def test_encoding_of_upload_urls(url, destination, encoded):
    assert encode_url(url, destination) == encoded


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_as_written_changes_nothing_twice(path):
    once = as_written(f"https://h/{path}")
    assert once.isascii()
    assert as_written(once) == once


@given(st.text(max_size=2000))
def test_messages_are_always_one_clean_line(text):
    line = one_line(text)
    assert line.isprintable()
    assert "\n" not in line
    assert "|" not in line
    assert 0 < len(line) <= 500


def test_words_are_not_taken_for_secrets():
    plain = "basic authentication failed: token expired, password missing; credential: none; see bearer tokens page"
    assert Scrubber().message(plain) == plain
    scrubber = Scrubber()
    scrubber.learn("abc")
    assert scrubber.message("abc is short") == "abc is short"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer SECRET.123456.abc",
        "access_token=SECRET1234",
        '{"access_token":"SECRET123"}',
        "X-Amz-Signature=SECRET0abc",
        "password: SECRETSECRETSECRETSECRET",
        "got https://u:SECRET@h/p?sig=SECRET back",
        "(ftp://SECRET:x@h)",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text):
    assert "SECRET" not in Scrubber().message(text)


def test_a_secret_that_is_learned_later_is_in_no_line_of_the_log():
    scrubber = Scrubber()
    log = PluginLog(scrubber)
    log.add("asked", place="https://h/p", header="k7Qz-93ab")
    scrubber.learn("k7Qz-93ab")
    text = log.text()
    assert "asked place=https://h/p" in text
    assert "k7Qz" not in text


@pytest.mark.parametrize("text", ["plain", "a\nb", "back\\", 'a"b\\c', "ümlaut", "a\x7f", ""])
def test_a_recorded_text_is_read_again_without_what_tears_records_apart(text):
    assert parse_ad(f"[ a = {recorded(text)} ]")["a"] == recordable(text)
