"""Goals about CachedAttention that are not met, and why."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.page_entry import Missed
from benchmarks.papers.page_simulated import Found


def _history(found: Found) -> Mapping[str, str]:
    """Say what history is worth to the bundled model: its perplexity without any, over that with it."""
    ratios = {
        row["text"]: row["ratio"]["none"]["value"]
        for row in found["rows"]
        if row["table"] == "perplexity" and row["model"] == "bundled"
    }
    return {"wiki": f"{ratios['WikiText-2']:.3f}", "dialogues": f"{ratios['dialogues: texts to read']:.3f}"}


def _saving(found: Found) -> Mapping[str, str]:
    rows = {(row["prompt"], row["saving"]): row for row in found["rows"]}
    prompts = sorted({prompt for prompt, _ in rows})
    first, last = prompts[0], prompts[-1]
    return {
        "more": f"{rows[first, 'on']['decode_ms'] - rows[first, 'off']['decode_ms']:.1f}",
        "off": f"{rows[first, 'off']['decode_ms']:.0f}",
        "again": f"{rows[last, 'off again']['decode_ratio']:.2f}",
        "awaited": ", ".join(f"{rows[prompt, 'on, awaited']['next_ratio']:.2f}" for prompt in prompts),
        "next": ", ".join(f"{rows[prompt, 'on']['next_ratio']:.2f}" for prompt in prompts),
    }


def _disk(found: Found) -> Mapping[str, str]:
    """Count microseconds for an extent of 64 rows, one thread: the plain loops', and ours."""

    def microseconds(what: str) -> tuple[str, str, str]:
        (row,) = [r for r in found["rows"] if (r["what"], r["rows"], r["threads"]) == (what, 64, 1)]
        size = row["reused"]["call_bytes"]
        rates = (row["reused"]["mb_per_s"], row["kept"]["mb_per_s"], row["mb_per_s"])
        reused, kept, ours = (f"{size / rate:.0f}" for rate in rates)
        return reused, kept, ours

    names = ("reused", "kept", "ours")
    read = dict(zip(names, microseconds("read"), strict=True))
    write = {f"w_{name}": value for name, value in zip(names, microseconds("write"), strict=True)}
    return read | write


def _evicting(found: Found) -> Mapping[str, str]:
    few, many = found["rows"][0], found["rows"][-1]
    return {
        "few": f"{few['evict_ms']:.1f}",
        "many": f"{many['evict_ms']:.1f}",
        "each": f"{many['evict_ms']:.0f}",
        "extents": f"{few['extents']:,}",
    }


def _memory(found: Found) -> Mapping[str, str]:
    last = found["rows"][-1]
    return {"tokens": f"{last['token_bytes_per_extent']:.0f}", "rest": f"{last['bytes_per_extent']:.0f}"}


ENTRIES = (
    Missed(
        "overflow",
        "Perplexity over a kept cache (CA) on WikiText-2",
        r"^perplexity CA / TT(, overflow 5)?: WikiText-2(, without a head)?$",
        "Not known. These things are measured. The loss is spread over all positions and all parts of the text, and the median token loses "
        "nothing. Words that occur in both the dropped and the kept half are 19 % of the tokens and 61 % of the loss. With another text in "
        "place of the dropped half, the first overflow costs 0.8 to 1.1 % instead of 1.8 %. With recomputed rows from layer 15 of 30 on it "
        "costs 0.1 % (one part of the text). So kept rows seem to refer, in deep layers, to the text that is gone.",
        (
            "Compute the first 64 or 128 kept rows anew: a ratio of 1.011 instead of 1.014.",
            "Keep 64 first tokens instead of one: 1.009 instead of 1.011. Keep the rows with the highest scores as well: worse.",
            "Where a text has no head, keep its first four tokens. This is built: without them the perplexity is 35.30, with them 18.78 (one part).",
            "Take only the keys, or only the values, from the recomputed rows: 1.027 and 1.017 instead of 1.019.",
        ),
        "A larger model: those of the paper have 7 billion parameters and more, and lose nothing. Or conversations instead of one long article: "
        "on MT-Bench-101 nothing is lost.",
    ),
    Missed(
        "overflow",
        "Choices after an overflow, LongEval",
        r"^points that CA loses to TT: LongEval",
        "The data says nothing: of 25 questions CA is right in one fewer than TT. Both are right less often than chance, and with no history at all "
        "the model is right more often. It cannot do the task.",
        (),
        "A model that can do the task (the paper's are right in 66 to 68 %), and more questions.",
        fewer="Nothing was tried, since there is nothing to see.",
    ),
    Missed(
        "truncation",
        "Perplexity with old positions (NKVT) of running text, bundled model",
        r"^perplexity NKVT / TT: (dialogues: texts to read|WikiText-2), bundled",
        "The bundled model predicts a text from its last few tokens, so that wrong positions of older rows cost little. Without any history its "
        "perplexity is {wiki} times that with it on WikiText-2, and {dialogues} times on the dialogues' texts.",
        (),
        "A model that has learned texts: stories260k on stories gives a factor of 64, and SmolLM2 6 to 40.",
        fewer="Nothing was tried: the goal needs another model. The same model on replies that recall facts gives 2.6.",
        figures=_history,
    ),
    Missed(
        "truncation",
        "Perplexity over a kept cache (CA) on WikiText-2, stories260k",
        r"^perplexity CA / TT: WikiText-2, stories260k",
        "Not known. The model was trained on children's stories alone, and does not know Wikipedia's text. The miss is smaller than the 95 % interval.",
        (),
        "Text of the kind that the model was trained on: on TinyStories it loses nothing (0.9994).",
        fewer="Nothing was tried with this model. What was tried with SmolLM2 on this text stands above.",
    ),
    Missed(
        "saving",
        "Saving while decoding",
        r"^(per decoded token|next job's first token), prompt of \d+: on / off",
        "Known in part. Saving adds {more} ms to the {off} ms of a token (1,024 tokens). Noise is about as large: without saving, measured again, a token behind 1,600 tokens takes "
        "{again} times as long. The next job is not delayed by the writes of the one before: it takes {next} times as long while these go on, and {awaited} "
        "times where they have ended, so its own saving costs that. What the rest of a decode step loses was not found.",
        (
            "Sum up checksums in one call of C without the interpreter lock, for which Python's threads wait up to 5 ms: 1.05 became 1.02 in one "
            "engine (1,600 tokens). This is built.",
            "A lower priority for the threads that copy and write: 0.99 instead of 1.06 beside other programs, but no gain on a quiet machine "
            "(1.07 and 1.09). Not kept.",
        ),
        "A free core for the threads that copy and write, or a device that computes by itself: here two cores do both. Neither was measured.",
        figures=_saving,
    ),
    Missed(
        "disk",
        "Files of extents at 80 % of a plain loop's speed",
        r"^(read|write) / fastest plain loop",
        "The fastest plain loop reads a file of 64 rows in {reused} us into one small buffer, again and again, and in {kept} us into memory as "
        "large as all files. A load has to do the second, and takes {ours} us: the rest is opening, looking at folders and head, and checksums. A write takes "
        "{w_ours} us where the loops take {w_reused} and {w_kept}: a file is made under another name, summed up, and renamed. How the time "
        "of a write divides among these was not measured.",
        (
            "Reads in one C call with io_uring, checksums computed while the rest comes: 0.56 and 0.77 of the plain loop at 64 and 256 rows, "
            "before 0.48 and 0.40 (busy machine).",
            "Pieces that all reads bring to one small buffer, summed up and carried past the cache in one pass: 0.79 and 0.80 of the plain loop for "
            "single reads, before 0.54 and 0.57 (busy machine). This is built.",
            "Without gain: eight pieces at once, plain copies out of that buffer, prefetching by hand.",
        ),
        "Larger extents: those of 1,024 rows come to 0.8 or are within noise of it. A disk that reports each request when it is done: this virtual one reports all at once, so that "
        "checksums cannot be computed meanwhile.",
        figures=_disk,
    ),
    Missed(
        "scale",
        "Eviction among a million extents",
        r"^evict: slower",
        "A heap orders the extents: evicting 1,000 takes {many} ms, and {few} ms where the cache has {extents}. The heap alone takes 13.0 and 1.4 ms. Its "
        "entries lie all over the memory, so large levels of it likely miss the processor's caches (not counted).",
        (
            "One flat tuple for each entry: 5.8 and 0.6 ms for the heap, so faster by half and no flatter. Not built.",
            "Entries in one line, as after a restart: 2.2 and 0.8 ms. Sorting a running heap into a line would hold up a step. Not built.",
        ),
        "A processor with larger caches (not measured). An eviction takes {each} us, which is little beside writing an extent.",
        figures=_evicting,
    ),
    Missed(
        "scale",
        "Memory of an extent with its tokens",
        r"^bytes of memory per extent, with its tokens",
        "The tokens of an extent stay in memory, and take {tokens} bytes; all else takes {rest}. Without the tokens it would be below the goal.",
        (
            "Smaller records, ids and times that are shared, tuples instead of lists: 1,189 bytes beside the tokens became 928. This is built.",
            "Tokens in a file, read when a prompt is looked up: 1,021 bytes (200,000 extents, freed memory returned to the system; without that, "
            "no less). A match took 80 us instead of 36, a start 10.5 s instead of 7.6. Not built: such a read may fail in the midst of planning, and "
            "beside a million extents on disk the memory is small.",
        ),
        "No hardware.",
        figures=_memory,
    ),
)
