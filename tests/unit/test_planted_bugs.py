"""Each bug that ``make planted`` plants can be planted in the product as it is."""

from __future__ import annotations

import pytest

from tests.crash.planted import BUGS, Planted


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_can_be_planted(bug: Planted) -> None:
    changes = bug.changes()
    assert changes
    for place, name, value in changes:
        assert getattr(place, name) is not value
