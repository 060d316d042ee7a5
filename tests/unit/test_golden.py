"""Compare the product with its golden listing, which only a change that is meant may change."""

from __future__ import annotations

import ast
import difflib

from tests.unit.golden_listing import LISTING, events, keys, listing, sentences


def test_the_golden_listing_is_that_of_the_code() -> None:
    diff = list(difflib.unified_diff(LISTING.read_text().splitlines(), listing().splitlines(), "listed", "code", n=0))
    assert not diff, "meant? then commit what 'make reference' writes:\n" + "\n".join(diff[:60])


def test_sentences_do_not_depend_on_the_form_of_the_code() -> None:
    one = ast.parse('def f(name):\n    """Say it so."""\n    raise E(f"the file {name} is gone, and nobody knows")\n')
    other = ast.parse("class A:\n  def g(self): return ('the file '\n  f'{self.name!r} is gone, and ' 'nobody knows')")
    assert list(sentences(one)) == list(sentences(other)) == ["the file {} is gone, and nobody knows"]


def test_a_changed_word_is_seen() -> None:
    before, after = (
        ast.parse(f"log.warn('file-{end}', 'f', path=path)\nprint('no file {end} here')\nads['last_{end}'] = 1")
        for end in ("gone", "kept")
    )
    for read in (events, keys, lambda trees: list(sentences(trees[0]))):
        assert read([before]) != read([after])
