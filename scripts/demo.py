"""The main job, shown: a conversation over turns and over a restart, with and without reuse, side by side.

The conversation is about a document, the Declaration of Independence (abridged), with SmolLM2-135M-Instruct. Where that model is
not installed, the bundled model is told facts between long texts, and asked for them.

Starts two servers, one with its cache and one with `--no-reuse`, talks to both through the
`openai` client, stops both with SIGTERM in the middle, starts them again, goes on, and prints per turn how many
prompt tokens came from which tier and what that did to the time to first token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from openai import DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.table import Table

from afterglow.bench import plain_environment
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED, default_model

START_SECONDS = 120
TIE = 1e-4  # a top-2 logit gap below which float rounding may choose either token
BUILD = Path("build")

console = Console(width=None if sys.stdout.isatty() else 130)


@dataclass
class Server:
    """One `afterglow serve` process."""

    name: str
    options: list[str]
    repetition_penalty: float = 1.0
    process: subprocess.Popen[bytes] | None = None
    client: OpenAI | None = None

    def start(self) -> float:
        """Start and wait until it answers; returns the seconds that took."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        began = time.perf_counter()
        path = BUILD / f"demo-{self.name}.log"
        with path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "afterglow.cli", "serve", "--port", str(port), *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=plain_environment(),
            )
        url = f"http://127.0.0.1:{port}"
        while True:
            if self.process.poll() is not None:
                sys.exit(f"the {self.name} server ended with {self.process.returncode}; see {path}")
            try:
                if httpx.get(f"{url}/health", timeout=1, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if time.perf_counter() - began > START_SECONDS:
                sys.exit(f"the {self.name} server did not answer within {START_SECONDS} s; see {path}")
            time.sleep(0.05)
        # No proxy leads there.
        client = DefaultHttpxClient(trust_env=False)
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=client)
        return time.perf_counter() - began

    def stop(self) -> float:
        """SIGTERM; returns the seconds until it was gone (dirty KV is written to disk in that time)."""
        if self.process is None:
            return 0.0
        began = time.perf_counter()
        if self.client is not None:
            self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None
        return time.perf_counter() - began

    def ask(self, messages: list[ChatCompletionMessageParam], max_tokens: int) -> dict[str, Any]:
        """One streamed chat completion: answer, usage, TTFT, and each token's top-2 gap."""
        assert self.client is not None
        began = time.perf_counter()
        ttft, text, usage = None, "", None
        tokens: list[tuple[str, float]] = []
        stream = self.client.chat.completions.create(
            model="afterglow",
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"repetition_penalty": self.repetition_penalty},
        )
        for chunk in stream:
            if chunk.choices:
                delta = chunk.choices[0].delta.content
                if ttft is None and delta:
                    ttft = time.perf_counter() - began
                text += delta or ""
                found = chunk.choices[0].logprobs
                for item in (found.content if found else None) or []:
                    top = item.top_logprobs
                    tokens.append((item.token, top[0].logprob - top[1].logprob if len(top) > 1 else 99.0))
            if chunk.usage is not None:
                usage = chunk.usage.model_dump()
        assert usage is not None
        return {"text": text, "usage": usage, "ttft": ttft or 0.0, "tokens": tokens}


def first_difference(a: list[tuple[str, float]], b: list[tuple[str, float]]) -> float | None:
    """The top-2 gap (in the recomputation) where two greedy answers part; None if they are the same."""
    for x, y in zip(a, b, strict=False):
        if x[0] != y[0]:
            return y[1]
    return None if len(a) == len(b) else 99.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=BUILD / "demo.json", metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    BUILD.mkdir(exist_ok=True)
    cache = BUILD / "demo-cache"
    shutil.rmtree(cache, ignore_errors=True)
    model = default_model()
    if model == BUNDLED:
        console.print(f"[dim]{ABOUT_BUNDLED}[/dim]")
    script = read_script(model)
    # In float32: with activations in 8 bits a last bit that differs can become a step of the rounding, and another word.
    common = [model, "--quantization", "none", "--served-model-name", "afterglow"]
    reuse = Server("reuse", [*common, "--cache-dir", str(cache)])
    plain = Server("no-reuse", [*common, "--no-reuse"])
    for server in (reuse, plain):
        server.repetition_penalty = script.get("repetition_penalty", 1.0)
    try:
        turns, ties, differences = converse(script, reuse, plain, args.max_tokens)
    finally:
        reuse.stop()
        plain.stop()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"model": model, "turns": turns, "ties": ties}, indent=1) + "\n")
    summary(script, turns, ties, differences)
    console.print(f"written to {args.json}")
    return 1 if differences else 0


def read_script(model: str) -> dict[str, Any]:
    """The user's messages for a model; a document goes before the first."""
    assets = files("afterglow") / "assets"
    name = "demo_conversation.json" if model == BUNDLED else "demo_document.json"
    script: dict[str, Any] = json.loads((assets / name).read_text("utf-8"))
    if "document" in script:
        document = (assets / script["document"]).read_text("utf-8").strip()
        first, *others = script["turns"]
        script["turns"] = [f"Here is a document.\n\n{document}\n\n{first}", *others]
    return {**script, "model": model}


def converse(
    script: dict[str, Any], reuse: Server, plain: Server, max_tokens: int
) -> tuple[list[dict[str, Any]], int, int]:
    messages: list[ChatCompletionMessageParam] = []
    if script.get("system"):
        messages.append({"role": "system", "content": script["system"]})
    restart_at = len(script["turns"]) // 2
    seconds = reuse.start(), plain.start()
    console.print(f"two servers on {script['model']} are up after {seconds[0]:.1f} and {seconds[1]:.1f} s\n")
    for server in (reuse, plain):  # the first request of a process pays for lazy initialisation
        server.ask([{"role": "user", "content": "Hello."}], 4)
    turns: list[dict[str, Any]] = []
    ties = differences = 0
    for number, text in enumerate(script["turns"]):
        if number == restart_at:
            stopped = reuse.stop(), plain.stop()
            started = reuse.start(), plain.start()
            console.print(
                f"[bold]SIGTERM to both servers: gone after {stopped[0]:.1f} and {stopped[1]:.1f} s; "
                f"up again after {started[0]:.1f} and {started[1]:.1f} s[/bold]\n"
            )
            for server in (reuse, plain):
                server.ask([{"role": "user", "content": "Good morning."}], 4)
        messages.append({"role": "user", "content": text})
        ours, theirs = reuse.ask(messages, max_tokens), plain.ask(messages, max_tokens)
        gap = first_difference(ours["tokens"], theirs["tokens"])
        if gap is not None:
            ties += gap < TIE
            differences += gap >= TIE
        usage = ours["usage"]
        turn = {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cached_tokens_details": usage["cached_tokens_details"],
            "ttft_ms": round(ours["ttft"] * 1e3, 2),
            "ttft_no_reuse_ms": round(theirs["ttft"] * 1e3, 2),
            "answer": ours["text"],
            "answer_no_reuse": theirs["text"],
            "after_restart": number >= restart_at,
        }
        turns.append(turn)
        tell(number, text, turn)
        messages.append({"role": "assistant", "content": ours["text"]})
    return turns, ties, differences


def tell(number: int, text: str, turn: dict[str, Any]) -> None:
    said = text if len(text) < 100 else f"{text[:60]} ... ({len(text)} characters) ... {text.splitlines()[-1][-80:]}"
    tiers = ", ".join(f"{n} {tier}" for tier, n in turn["cached_tokens_details"].items() if n) or "none"
    console.print(f"[bold]{number + 1} user[/bold]       {said}", highlight=False)
    console.print(f"  [bold]assistant[/bold]  {turn['answer'].strip()}", highlight=False)
    console.print(
        f"  [dim]{turn['prompt_tokens']} prompt tokens, cached: {tiers}; first token after "
        f"{turn['ttft_ms']:.0f} ms, {turn['ttft_no_reuse_ms']:.0f} ms without reuse[/dim]\n",
        highlight=False,
    )


def summary(script: dict[str, Any], turns: list[dict[str, Any]], ties: int, differences: int) -> None:
    table = Table(title="turn by turn", title_justify="left")
    for column in ("turn", "prompt tokens", "cached", "device", "host", "disk", "TTFT ms", "without reuse", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("same answer")
    for i, turn in enumerate(turns):
        details = turn["cached_tokens_details"]
        table.add_row(
            f"{i + 1}{' (restarted)' if turn['after_restart'] and not turns[i - 1]['after_restart'] else ''}",
            str(turn["prompt_tokens"]),
            f"{turn['cached_tokens']} ({100 * turn['cached_tokens'] / turn['prompt_tokens']:.0f} %)",
            *(str(details[tier]) for tier in ("device", "host", "disk")),
            f"{turn['ttft_ms']:.1f}",
            f"{turn['ttft_no_reuse_ms']:.1f}",
            f"1/{turn['ttft_no_reuse_ms'] / turn['ttft_ms']:.1f}",
            "yes" if turn["answer"] == turn["answer_no_reuse"] else "no",
        )
    console.print(table)
    later = turns[1:]
    share = sum(t["cached_tokens"] for t in later) / sum(t["prompt_tokens"] for t in later)
    ratio = statistics.median(t["ttft_no_reuse_ms"] / t["ttft_ms"] for t in later)
    console.print(
        f"after the first turn {100 * share:.1f} % of all prompt tokens came from the cache; "
        f"median TTFT 1/{ratio:.1f} of recomputing"
    )
    console.print(f"answers that part: {differences}; at a top-2 logit gap below {TIE:g} (a float tie): {ties}")
    for turn, value in script.get("expected", {}).items():
        right = value.lower() in turns[int(turn)]["answer"].lower()
        console.print(f"turn {int(turn) + 1} should know {value!r}: {'it does' if right else 'it does NOT'}")


if __name__ == "__main__":
    sys.exit(main())
