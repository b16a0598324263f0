"""Afterglow on Ray Serve: `serve run afterglow.ray:app model=MODEL replicas=2`. `docs/cluster.md` says more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """Build the Serve application. `args`: those of `DeployOptions`, `model`, and all options of `afterglow serve`.

    Raises: ClickException, which `serve run` prints as one line.
    """
    from afterglow.ray.application import application

    return application(args)
