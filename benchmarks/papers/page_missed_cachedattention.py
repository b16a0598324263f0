"""Goals about CachedAttention that are not met, and why."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from benchmarks.papers.page_entry import Missed
from benchmarks.papers.page_goals import read
from benchmarks.papers.page_simulated import Found


def _history(found: Found) -> Mapping[str, str]:
    """Take perplexities over that of recomputing: without any history, with old positions, and with rows chosen otherwise."""
    rows = [row for row in found["rows"] if row["table"] == "perplexity"]
    own = {row["text"]: row["ratio"] for row in rows if row["model"] == "bundled"}
    (small,) = [row["ratio"] for row in rows if (row["model"], row["text"]) == ("stories260k", "WikiText-2")]

    def old(text: str) -> str:
        return f"{own[text]['NKVT']['value']:.2f}"

    return {
        "wiki": f"{own['WikiText-2']['none']['value']:.3f}",
        "dialogues": f"{own['dialogues: texts to read']['none']['value']:.3f}",
        "half": old("dialogues, half the window: texts to read"),
        "crowded": old("dialogues, crowded: texts to read"),
        "replies": old("dialogues: replies"),
        "values": old("dialogues: values in replies"),
        **{f"small_{way}": f"{small[way]['value']:.3f}" for way in ("none", "sinks_and_recent", "importance")},
    }


def _topics(found: Found) -> Mapping[str, str]:
    """Count the questions that CA and TT get right, and take by how many nats the right topic's loss is below the best wrong one's."""
    rows = [row for row in found["rows"] if row["text"].startswith("LongEval topics")]
    first, others = (
        {arm: f"{row['accuracy'][arm]['value'] * row['questions'] / 100:.0f}" for arm in ("CA", "TT")} for row in rows
    )

    def below(arm: str) -> str:
        parts = [part for part in found["parts"] if (part["text"], part["arm"]) == (rows[-1]["text"], arm)]
        margins = [
            min(wrong) - right for part in parts if part["part"] != "validation" for right, *wrong in part["losses"]
        ]
        return f"{mean(margins):.1f}"

    return {
        "questions": f"{rows[-1]['questions']}",
        "first": f"{first['CA']} and {first['TT']}",
        "others": f"{others['CA']} and {others['TT']}",
        **{arm: below(arm) for arm in ("CA", "TT", "alone")},
    }


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
        "gpu": ", ".join(f"{row['beside_over_off']:.2f}" for row in read("gpu/saving")["rows"]),
        "gpu_commit": read("gpu/saving")["commit"],
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
        "truncation",
        "Perplexity with old positions (NKVT) of running text, bundled model",
        r"^perplexity NKVT / TT: (dialogues: texts to read|WikiText-2), bundled",
        "The bundled model predicts a text from its last few tokens, so that wrong positions of older rows cost little. Without any history its "
        "perplexity is {wiki} times that with it on WikiText-2, and {dialogues} times on the dialogues' texts.",
        (
            "Half the window, 1,024 tokens: {half} on the dialogues' texts.",
            "Dialogues crowded with facts: {crowded} on their texts.",
            "Text that needs its history: {replies} on the replies, which recall facts, and {values} on the values in them.",
        ),
        "A model that has learned texts: stories260k on stories gives a factor of 64, and SmolLM2 6 to 40.",
        figures=_history,
    ),
    Missed(
        "truncation",
        "Perplexity over a kept cache (CA) on WikiText-2, stories260k",
        r"^perplexity CA / TT: WikiText-2, stories260k",
        "History is worth nothing to this model on this text, so there is no loss of history to measure: without any its perplexity is {small_none} ± 0.10 times that with recomputed history, and with 64 first tokens alone 0.90 ± 0.08 times. It was "
        "trained on children's stories alone. The miss is smaller than the 95 % interval.",
        (
            "Keep 4, 16 or 64 first tokens as well: 1.018, 1.021 and 1.022 (the same six parts, scratch program over `benchmarks/papers/cachedattention/overflow/context.py`; intervals of 0.007 to 0.011).",
            "Keep the first and last tokens, or those with the highest scores: {small_sinks_and_recent} and {small_importance}.",
        ),
        "Text of the kind that the model was trained on: on TinyStories it loses nothing (0.9994).",
        figures=_history,
    ),
    Missed(
        "choices",
        "Topics of a LongEval record after five overflows",
        r"^points that CA loses to TT: LongEval topics",
        "There are {questions} questions, so that two points are less than one of them. CA and TT get {first} right where the topics are the record's, "
        "and {others} where the others are of other records. There CA does lose something: the loss of the right topic is below that of the best "
        "wrong one by {CA} nats, with TT by {TT}, and with the record alone by {alone}. This is no damage by truncation: 20 of these questions were asked behind a "
        "conversation of one window (scratch program). With nothing truncated, in a window of 8,192, it is 5.6 nats; after one overflow 5.7 with CA, and 6.7 with TT. "
        "So CA answers as one who still has the whole conversation, and TT does better because it has forgotten the other text before the record.",
        (
            "One overflow instead of five, for the same 20 questions: CA is below TT by as much (5.7 and 6.7 nats, where it is 5.3 and 6.2).",
            "Each of the six rules to choose by: CA gets one or two questions fewer right by each of them where the others are of other records, and none or one where "
            "they are the record's.",
        ),
        "More records: there are 50, and 12 of them choose the rule. Or a larger model, which unrelated text disturbs less (not measured).",
        figures=_topics,
    ),
    Missed(
        "saving",
        "Saving while decoding",
        r"^(per decoded token|next job's first token), prompt of \d+: on / off",
        "Known in part. Saving adds {more} ms to the {off} ms of a token (1,024 tokens). Noise is about as large: without saving, measured again, a token behind 1,600 tokens takes "
        "{again} times as long. The next job is not delayed by the writes of the one before: it takes {next} times as long while these go on, and {awaited} "
        "times where they have ended, so its own saving costs that. What the rest of a decode step loses was not found, and not searched further: it needs a quiet machine.",
        (
            "Sum up checksums in one call of C without the interpreter lock, for which Python's threads wait up to 5 ms: 1.05 became 1.02 in one "
            "engine (1,600 tokens). This is built.",
            "A lower priority for the threads that copy and write: 0.99 instead of 1.06 beside other programs, but no gain on a quiet machine "
            "(1.07 and 1.09). Not kept.",
        ),
        "A free core for the threads that copy and write (not measured): here two cores do both. A device that computes by itself does not suffice: on an H200, with the shape of LLaMA-13B, a turn that saves takes {gpu} times as long "
        "as one that does not (`benchmarks/results/gpu/saving.json`, commit {gpu_commit}), since it waited for room in the write buffer. Since then rows leave the device straight for the host's slots, which was not measured on a GPU.",
        figures=_saving,
    ),
    Missed(
        "disk",
        "Files of extents at 80 % of a plain loop's speed",
        r"^(read|write) / fastest plain loop",
        "The fastest plain loop reads a file of 64 rows in {reused} us into one small buffer, again and again, and in {kept} us into memory as "
        "large as all files. A load has to do the second, and takes {ours} us: the rest is opening, looking at folders and head, and checksums. A write takes "
        "{w_ours} us where the loops take {w_reused} and {w_kept}. Its bytes go in one call, as theirs do. What it does beside that was counted: it looks at its folders twice and renames the file (strace: 8 calls of the system, "
        "where the loop makes 4), hands the checksums to a thread and takes them back (7 more), and executes 880,000 instructions, 29 % of them sums and the rest Python, which lays out slots and makes the head (valgrind). How the "
        "time divides among these was not measured.",
        (
            "Reads in one C call with io_uring, checksums computed while the rest comes: 0.56 and 0.77 of the plain loop at 64 and 256 rows, "
            "before 0.48 and 0.40 (busy machine).",
            "Pieces that all reads bring to one small buffer, summed up and carried past the cache in one pass: 0.79 and 0.80 of the plain loop for "
            "single reads, before 0.54 and 0.57 (busy machine). This is built.",
            "Without gain: eight pieces at once, plain copies out of that buffer, prefetching by hand.",
            "Chunks carried to their slots one after the other instead of three side by side: 2,189 instead of 833 MB/s for whole extents of 1,024 rows (two full runs, one thread) on a processor whose writes past the cache are slow to several places in turn (Zen 3, AVX2). This is built.",
            "Writes: checksums of a piece beside the write of the one before, 10 to 17 % faster where a file has several pieces. This is built. Room for the whole file asked for first (`posix_fallocate`), and pieces above 4 MiB: no gain.",
        ),
        "Another machine. On one with an Intel processor and another disk (commit c90bd80) reads came to 0.66 to 0.72 of the plain loop with 64 rows, 0.77 to 0.80 with 256, and 0.79 to 0.85 with 1,024, writes to 0.61 to 0.86. On an AMD processor with AVX-512 (Zen 4, repeats 10 to 24 % apart, so not kept) reads came to 0.61 to 0.84, writes to 0.72 to 0.97. A disk that reports each request "
        "when it is done: these virtual ones report all at once, so that checksums cannot be computed meanwhile.",
        figures=_disk,
    ),
    Missed(
        "scale",
        "Eviction among a million extents",
        r"^evict: slower",
        "A heap orders the extents: evicting 1,000 takes {many} ms, and {few} ms where the cache has {extents}. The heap alone takes 13.0 and 1.4 ms. Its "
        "entries lie all over the memory, and miss the processor's caches. Counted by valgrind's cache simulation (2 MiB of second cache): an eviction among 10,000 extents executes 43,500 instructions and misses that cache 35 times, among "
        "100,000 81 times, and among a million 48,100 instructions and 125 times. Of the additional misses of reads 80 % are comparisons of the heap's entries, and 18 % look-ups in dictionaries. A third cache of 32 MiB is missed 25 times among 10,000, and 54 among 100,000.",
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
