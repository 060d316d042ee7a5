"""HTCondor's configuration, as this process and as running daemons see it."""

from __future__ import annotations

from typing import Any

from stageout.condor import bindings
from stageout.condor.limits import COMMAND_QUERY_S, QUERY_DEFAULT_S
from stageout.core.config import Settings


def condor_settings(local_name: str = "") -> Settings:
    """Return the settings of the HTCondor configuration that this process sees.

    :param local_name: as given to a daemon by ``-local-name``; ``NAME.KNOB`` then comes before ``KNOB``.
    :raises BindingsMissing: there are no bindings here.
    """
    parameters = bindings.htcondor().param

    def look_up(name: str) -> str | None:
        for key in ([f"{local_name}.{name}"] if local_name else []) + [name]:
            found = parameters.get(key)
            if found is not None:
                return str(found)
        return None

    return Settings(look_up)


def reload_condor() -> None:
    """Read the HTCondor configuration again (SIGHUP)."""
    bindings.htcondor().reload_config()


def parameter_names() -> list[str]:
    """Return the names of all parameters of the HTCondor configuration that this process sees."""
    return [str(name) for name in bindings.htcondor().param.keys()]  # noqa: SIM118 - no ordinary mapping


def wait_less() -> None:
    """Wait less long for a collector in this process, unless QUERY_TIMEOUT is configured."""
    parameters = bindings.htcondor().param
    if str(parameters.get("QUERY_TIMEOUT", QUERY_DEFAULT_S)) == str(QUERY_DEFAULT_S):
        parameters["QUERY_TIMEOUT"] = str(COMMAND_QUERY_S)


def running_value(location: Any, parameter: str) -> str | None:
    """Return a parameter as a running daemon has it. :raises CondorError: the daemon does not tell."""
    with bindings.faults():
        found: str | None = bindings.htcondor().RemoteParam(location).get(parameter)
        return found
