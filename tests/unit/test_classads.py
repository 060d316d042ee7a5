"""ClassAds without bindings, held against HTCondor's own reader and writer."""

import math
import subprocess
import sys
import time

import classad2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageout.core import classads
from stageout.core.classad_parser import parse_ad, parse_ads, parse_old
from stageout.core.classads import ClassAd, ClassAdSyntaxError, Expr

# Text that both sides can hold: no NUL, no surrogates (classad2 refuses bytes that are not UTF-8).
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
names = st.one_of(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), texts.filter(bool))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    texts,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3).map(ClassAd)),
    max_leaves=8,
)
ads = st.dictionaries(names, values, min_size=1, max_size=5).map(ClassAd)
slow_machine = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def from_condor(value):
    """A classad2 value in our types."""
    if isinstance(value, classad2.ClassAd):
        return ClassAd({name: from_condor(value[name]) for name in value.keys()})  # noqa: SIM118 - not a plain mapping
    if isinstance(value, list):
        return [from_condor(item) for item in value]
    if value is classad2.Value.Undefined:
        return None
    return Expr(str(value)) if isinstance(value, (classad2.ExprTree, classad2.Value)) else value


def same(ours, theirs):
    """Equal in type and value; reals within the 16 digits that HTCondor prints."""
    if isinstance(ours, float):
        return isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-14)
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, ClassAd):
        return isinstance(theirs, ClassAd) and len(ours) == len(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    return type(ours) is type(theirs) and ours == theirs


@slow_machine
@given(ads)
def test_condor_reads_what_we_write(ad):
    text = classads.unparse_ad(ad)
    assert "\n" not in text
    assert text.isascii()
    assert same(ad, from_condor(classad2.ClassAd(text)))


@slow_machine
@given(ads)
def test_we_read_what_condor_writes(ad):
    theirs = classad2.ClassAd(classads.unparse_ad(ad))
    assert same(parse_ad(repr(theirs)), ad)
    assert same(parse_ad(str(theirs)), ad)


@settings(slow_machine, max_examples=40)
@given(st.lists(ads, max_size=4), st.sampled_from(["", " ", "\n", " , ", "/* [ */", "// ]\n"]))
def test_streams_with_any_separator(many, separator):
    text = separator.join(map(classads.unparse_ad, many)) + " " * 300
    assert list(parse_ads(text)) == many
    assert list(parse_ads("{" + text + "}")) == many


flat = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
        lambda name: name.lower() not in ("error", "is", "true", "false", "isnt", "parent", "undefined")
    ),
    st.one_of(
        st.booleans(),
        st.integers(-(2**62), 2**62),
        st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\x85"), max_size=20),
    ),
    min_size=1,
    max_size=5,
)


@slow_machine
@given(flat)
def test_old_syntax_both_ways(items):
    ad = ClassAd(items)
    theirs = classad2.ClassAd()
    for name in ad:
        theirs[name] = ad[name]
    assert same(parse_old(theirs.printOld()), ad)
    (back,) = classad2.parseAds(classads.unparse_old(ad), classad2.ParserType.Old)
    assert same(from_condor(back), ad)


@slow_machine
@given(st.text(alphabet="[]{}();=,\"'\\/*ab1 \n.-", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        list(parse_ads(text))
    except ClassAdSyntaxError as problem:
        assert "broken at character" in str(problem)
    parse_old(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b", Expr("a + b")),
        ('b == "]" ? {1} : [c=";"]', Expr('b == "]" ? {1} : [c=";"]')),
        ("[b=1].b", Expr("[b=1].b")),
        ("{1,2}[0]", Expr("{1,2}[0]")),
        ("f(a, /* ; */ {1})", Expr("f(a, /* ; */ {1})")),
        ("a / b", Expr("a / b")),
        ("'q;]'", Expr("'q;]'")),
        ("error", Expr("error")),
        ("1K", Expr("1K")),
        ('"x" "y"', "xy"),
        (r'"\101\60\303\251\n\'"', "A0é\n'"),
        ("-5", -5),
        ("TRUE", True),
        ("undefined", None),
        ("1e3", 1000.0),
        ('real("-INF")', -math.inf),
        ("{ [a=1], {} }", [ClassAd({"a": 1}), []]),
    ],
)
def test_values(text, value):
    assert same(parse_ad(f"[ x = {text} ]")["x"], value)
    assert same(parse_ad(f"[ x = {text}; y = 1 ]")["x"], value)


@pytest.mark.parametrize(
    "text", ["[", "[a]", "[a=]", "[a=1", '[a="x]', "[a=(]", "x", "[a=1]]", "[a=b}]", "[a=" * 100 + "1" + "]" * 100]
)
def test_broken_ads_are_refused(text):
    with pytest.raises(ClassAdSyntaxError):
        list(parse_ads(text))


def test_good_ads_before_a_broken_one_are_yielded():
    stream = parse_ads("[a=1][ ][b=2][c=")
    assert [next(stream), next(stream), next(stream)] == [ClassAd({"a": 1}), ClassAd(), ClassAd({"b": 2})]
    with pytest.raises(ClassAdSyntaxError):
        next(stream)


def test_names_ignore_case():
    ad = parse_ad('[ Url = "x"; LocalFileName = "y" ]')
    assert ad["URL"] == ad["url"] == "x"
    ad["URL"] = "z"
    assert list(ad) == ["Url", "LocalFileName"]
    assert "uRL" in ad
    assert ad.text("URL") == "z"
    del ad["LOCALFILENAME"]
    assert ad == {"url": "z"}


def test_wrong_types_fall_back():
    ad = ClassAd({"a": Expr("b"), "b": True, "c": 3})
    assert ad.text("a", "none") == "none"
    assert ad.integer("b", 7) == 7
    assert ad.integer("c") == 3


def test_bytes_that_are_not_utf8_survive():
    path = b"/scratch/\xff\xe9 \xc3\xa9".decode("utf-8", "surrogateescape")
    text = classads.unparse_ad({"p": path})
    assert text == r'[ p = "/scratch/\377\351 \303\251" ]'
    assert parse_ad(text)["p"] == path
    assert parse_ad(classads.decode(b'[p="/scratch/\xff\xe9 \xc3\xa9"]'))["p"] == path


def test_writer_never_breaks_a_line_and_keeps_types():
    ad = {"s": 'a\nb"\\\0', "f": 2.0, "i": 2, "t": True, "big": 2**70, "tiny": 1e-300, "nan": math.nan}
    assert classads.unparse_ad(ad) == (
        r'[ s = "a\nb\"\\ "; f = 2.0; i = 2; t = true; '
        r'big = 1.1805916207174113e+21; tiny = 1.0e-300; nan = real("NaN") ]'
    )
    with pytest.raises(TypeError, match="bytes"):
        classads.unparse(b"x")


def test_old_syntax_of_a_job_ad():
    ad = parse_old(
        '# job\nGlobalJobId = "vm#1.0#17"\nUser="a\\"b"\nArgs = "C:\\dir\\"\nJobPrio = 0\n'
        'Requirements = (TARGET.Arch == "X86_64") && true\nStageOutGuard = true // yes\n*** not one\nX ==\n'
    )
    assert ad == {
        "GlobalJobId": "vm#1.0#17",
        "User": 'a"b',
        "Args": "C:\\dir\\",
        "JobPrio": 0,
        "Requirements": Expr('(TARGET.Arch == "X86_64") && true'),
        "StageOutGuard": True,
    }


def test_ten_thousand_input_ads_in_under_a_second():
    text = "".join(f'[ Url = "probe://host/a/in{i}"; LocalFileName = "/scratch/dir_71/in{i}" ]' for i in range(10_000))
    started = time.process_time()
    assert sum(1 for _ in parse_ads(text)) == 10_000
    assert time.process_time() - started < 1.0


def test_import_takes_under_5_ms():
    code = "import time; t = time.process_time(); import stageout.core.classads; print(time.process_time() - t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    assert min(seconds) < 0.005
