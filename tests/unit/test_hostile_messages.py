"""No decoder that a stranger can reach does anything else with a message than read it or refuse it in its own words."""

from __future__ import annotations

import pytest

from stageout.overlay.wire import messages
from tests.unit.hostile_messages import DECODERS, ill_typed, wrong


@pytest.mark.parametrize("name", DECODERS)
def test_a_changed_message_is_read_or_refused(name: str) -> None:
    """And what is read is of the types that are declared, and takes no more memory than the message allows."""
    decoder = DECODERS[name]
    assert not [problem for problem in (ill_typed(decoder.read(sample)) for sample in decoder.samples) if problem]
    assert not [problem for problem in (wrong(name, seed, seed < 1) for seed in range(12)) if problem]


@pytest.mark.parametrize("name", [name for name, one in DECODERS.items() if one.samples[0].startswith(b"{")])
def test_what_is_nested_without_end_is_refused(name: str) -> None:
    with pytest.raises(DECODERS[name].refuses):
        DECODERS[name].read(b'{"a":' + b"[" * 100_000)


def test_every_message_has_a_decoder_here() -> None:
    assert {kind.name for kind in messages.TYPES.values()} <= DECODERS.keys()
