"""Sessions of the commands that change or show names at a router."""

from __future__ import annotations

import argparse

from stageout.overlay.channel import Gateway
from stageout.overlay.cli.targets import through
from stageout.overlay.operations import Session
from stageout.overlay.settings import routes_of


def session_of(gateway: Gateway, options: argparse.Namespace) -> Session:
    """Return a session with a router, through the custodian that the options name."""
    custodian = through(gateway, options.through)[0] if getattr(options, "through", None) else None
    return Session(gateway, routes=routes_of(options.routes, custodian or gateway), through=custodian)
