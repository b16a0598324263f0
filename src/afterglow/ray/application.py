"""The Serve application: replicas, and how Ray routes to them, watches over them and adds some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from afterglow.errors import UserError
from afterglow.ray.deploy_options import read_arguments
from afterglow.ray.replica import ServeReplica

DEPLOYMENT = "afterglow"
LAST_WRITES_S = 15.0  # after running requests have ended


def application(args: Mapping[str, Any]) -> serve.Application:
    """Build the application. Raises: ClickException."""
    try:
        found = read_arguments(args)
    except UserError as error:
        raise click.ClickException(str(error)) from None
    options, config = found.options, found.config
    batch = config.batch_on("cuda" if options.gpus and config.device != "cpu" else "cpu")
    if options.max_replicas is None:
        size: dict[str, Any] = {"num_replicas": options.replicas}
    else:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=batch,
        )
        size = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        serve.ingress()(ServeReplica),
        name=DEPLOYMENT,
        max_ongoing_requests=batch + config.max_queue,  # the engine has a queue itself
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=found.server.grace + LAST_WRITES_S,
        request_router_config=RequestRouterConfig(request_router_class="afterglow.ray.session_router.SessionRouter"),
        **size,
    )
    return deployment.bind(found.model, found.server, config)
