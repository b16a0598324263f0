"""Train the small chat model, or evaluate it: see `scripts.small_model`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.small_model.dialogues import Writer
from scripts.small_model.evaluate import evaluate
from scripts.small_model.filler import filler_sentences
from scripts.small_model.model import ModelConfig, SmallLlama
from scripts.small_model.model_files import atomic_write, export, load
from scripts.small_model.muon import Muon
from scripts.small_model.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Stage:
    """A step of the curriculum: row lengths with their shares of the tokens."""

    lengths: dict[int, float]
    induction: float
    until: float
    """Latest end, as a fraction of the training time."""
    recall: float
    """Ends earlier when recall on the longest rows passes this."""
    bind: float
    """Share of the dialogues whose facts are all of one or two kinds."""
    bridge: float
    """Share of the rows that are keys, phrases and values without a dialogue."""


STAGES = [
    Stage({64: 1.0}, 0.5, 0.22, 0.74, 0.0, 0.5),
    Stage({128: 1.0}, 0.05, 0.42, 0.88, 0.6, 0.35),
    Stage({128: 0.3, 256: 0.7}, 0.02, 0.55, 0.92, 0.6, 0.1),
    Stage({128: 0.1, 256: 0.3, 512: 0.6}, 0.01, 0.68, 0.93, 0.5, 0.05),
    Stage({256: 0.25, 512: 0.25, 1024: 0.5}, 0.0, 0.82, 0.88, 0.4, 0.02),
    Stage({256: 0.1, 512: 0.2, 1024: 0.3, 2040: 0.4}, 0.0, 1.0, 2.0, 0.4, 0.0),
]


def batch(
    writer: Writer, length: int, rows: int, induction: float, bridge: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of one step."""
    ids, weights = [], []
    for _ in range(rows):
        draw = writer.rng.random()
        if draw < induction:
            d = writer.induction(length + 1)
        elif draw < induction + bridge:
            d = writer.bridge(length + 1)
        else:
            d = writer.dialogue(length + 1)
        ids.append(d.ids[: length + 1])
        weights.append(d.weights[: length + 1])
    x = torch.tensor(ids, device=device)
    w = torch.tensor(weights, device=device)
    return x[:, :-1], x[:, 1:], w[:, 1:]


def train(args: argparse.Namespace) -> None:
    """Train, log, save and export."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    work = Path(args.work or (args.out + ".work"))
    work.mkdir(parents=True, exist_ok=True)
    out = Path(args.out)
    sentences, held = filler_sentences()
    checkpoint = work / "state.pt"
    resume = args.resume and checkpoint.exists()
    if resume:
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(sentences, args.vocab)
        tokenizer.save(str(work / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
    )
    torch.manual_seed(args.seed)
    model = SmallLlama(config).to(device)
    matrices = [p for n, p in model.named_parameters() if n.endswith("proj.weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("proj.weight")]
    if args.compile:
        model.run_hidden = torch.compile(model.hidden, dynamic=False)
    muon = Muon(matrices, lr=args.lr)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    tokens, seconds, stage, step = 0, 0.0, 0, 0
    recall: dict[int, float] = {}
    if resume:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        tokens, seconds = saved["tokens"], saved["seconds"]
        stage, step, recall = saved["stage"], saved["step"], saved.get("recall", {})
    if args.stage is not None:
        stage = args.stage
    writer = Writer(tokenizer, sentences, args.seed + 1 + step)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"parameters {count:,}  vocabulary {config.vocab_size}  filler sentences "
        f"{len(sentences)} + {len(held)} held out  device {device}",
        flush=True,
    )

    def save() -> None:
        temporary = checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "tokens": tokens,
                "seconds": seconds,
                "stage": stage,
                "step": step,
                "recall": recall,
            },
            temporary,
        )
        os.replace(temporary, checkpoint)
        export(model, tokenizer, out)

    started, before = time.monotonic(), seconds
    report = saved_at = time.monotonic()
    shown, loss_sum, loss_n = tokens, 0.0, 0
    total = args.minutes * 60
    while seconds < total:
        plan = STAGES[stage]
        reached = recall.get(max(plan.lengths), 0.0)
        if plan.induction + plan.bridge > 0.9:
            reached = min(recall.get(-1, 0.0), recall.get(-2, 0.0))
        if stage + 1 < len(STAGES) and (seconds / total > plan.until or reached > plan.recall):
            stage += 1
            print(f"stage {stage}: {STAGES[stage]}", flush=True)
        plan = STAGES[stage]
        writer.p_bind = plan.bind
        length = writer.rng.choices(list(plan.lengths), list(plan.lengths.values()))[0]
        rows = max(1, args.batch // length)
        x, y, w = batch(writer, length, rows, plan.induction, plan.bridge, device)
        scale = min(1.0, (step + 1) / 20, max(0.0, (1 - seconds / total) / args.decay))
        for group in muon.param_groups:
            group["lr"] = args.lr * scale
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * scale
        loss, right = model.loss(x, y, w)
        loss = loss / w.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        tokens += x.numel()
        loss_sum += loss.item()
        loss_n += 1
        for key, value in zip((length, -1, -2), right.tolist(), strict=True):
            if not math.isnan(value):
                old = recall.get(key, 0.0)
                recall[key] = old + 0.06 * (value - old)
        now = time.monotonic()
        seconds = before + now - started
        if now - report > args.report:
            rates = " ".join(f"{k}:{v:.3f}" for k, v in sorted(recall.items()))
            print(
                f"min {seconds / 60:6.2f} stage {stage} step {step} tokens {tokens / 1e6:.3f}M "
                f"loss {loss_sum / loss_n:.4f} recall[{rates}] "
                f"{(tokens - shown) / (now - report):.0f} tok/s",
                flush=True,
            )
            report, shown, loss_sum, loss_n = now, tokens, 0.0, 0
        if now - saved_at > args.save_every:
            save()
            saved_at = now
    save()
    print(f"trained {tokens:,} tokens in {seconds / 60:.1f} minutes", flush=True)
    result = evaluate(model, tokenizer)
    result |= {"training_tokens": tokens, "training_minutes": round(seconds / 60, 1)}
    atomic_write(out / "evaluation.json", (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result, indent=2), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", default="build/small-model")
    parser.add_argument("--work", default=None, help="folder for the resumable state")
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", metavar="DIR", default=None)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=0.012, help="of Muon")
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--decay", type=float, default=0.8, help="share of the time in which the rates decay")
    parser.add_argument("--stage", type=int, default=None, help="start at this stage")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--report", type=float, default=15.0, help="seconds between reports")
    parser.add_argument("--save-every", type=float, default=180.0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.evaluate:
        model, tokenizer = load(Path(args.evaluate))
        result = evaluate(model, tokenizer)
        path = Path(args.evaluate) / "evaluation.json"
        if path.exists():
            old = json.loads(path.read_text())
            keep = ("training_tokens", "training_minutes")
            result |= {k: old[k] for k in keep if k in old}
        atomic_write(path, (json.dumps(result, indent=2) + "\n").encode())
        print(json.dumps(result, indent=2))
        return
    train(args)


if __name__ == "__main__":
    main()
