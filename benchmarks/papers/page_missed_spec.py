"""Goals about SPEC that are not met, and why."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.page_entry import Missed
from benchmarks.papers.page_goals import percent, read
from benchmarks.papers.page_simulated import Found

IN_C = (
    "Column sums in one C call: 5.1 ms became 1.3 a layer. This is built.",
    "The vote in one C call: 0.7 ms became 0.16 a layer. This is built.",
)
LARGER = "Larger models, whose attention lies on fewer rows: the paper's have 6.7 billion parameters and more."


def _of_texts(found: Found, text: str, key: str) -> dict[tuple[str, str, float], str]:
    """Take values in % by protocol, mode and share of the rows."""
    return {
        (row["protocol"], row["mode"], row["retention"]): f"{row[key]['value']:.0f}"
        for row in found["rows"]
        if row["table"] == "quality" and row["text"] == text and row["alpha"] == 0.6 and row[key] is not None
    }


def _recalled(found: Found) -> Mapping[str, str]:
    recall = _of_texts(found, "dialogues", "recall")

    def three(mode: str) -> str:
        return ", ".join(recall["published", mode, share] for share in (0.5, 0.25, 0.1))

    return {
        "spec": three("spec"),
        "spi": three("spi"),
        "all": recall["scored", "exact", 1.0],
        "scored": recall["scored", "spec", 0.5],
        "renewed": recall["generated", "spec", 0.5],
        "renewed_spi": recall["generated", "spi", 0.5],
    }


def _alike(found: Found) -> Mapping[str, str]:
    dialogues = _of_texts(found, "dialogues", "text_agreement")
    stories = _of_texts(found, "stories", "text_agreement")
    modes = ("spec", "spi", "h2o", "random", "sinks")
    return {
        **{mode: dialogues["scored", mode, 0.25] for mode in modes},
        **{f"s_{mode}": stories["scored", mode, 0.25] for mode in ("spec", "spi", "h2o")},
        "renewed": dialogues["generated", "spec", 0.25],
        "renewed_spi": dialogues["generated", "spi", 0.25],
        "s_renewed": stories["generated", "spec", 0.25],
        "s_renewed_spi": stories["generated", "spi", 0.25],
    }


def _means(found: Found) -> Mapping[str, str]:
    rows = {(row["text"], row["protocol"], row["arm"]): row for row in found["rows"]}

    def recall(protocol: str, arm: str) -> str:
        return f"{rows['dialogues, 2.6 M', protocol, arm]['recall']['value']:.0f}"

    def kept(protocol: str, arm: str) -> str:
        return percent(rows["dialogues, 2.6 M", protocol, arm]["kept"])

    def lost(text: str, protocol: str, arm: str) -> str:
        return f"{100 - rows[text, protocol, arm]['agreement']['value']:.1f}"

    quarter, mass, real, small = "25% of the rows", "95% of the attention", "WikiText-2, SmolLM2", "dialogues, 2.6 M"
    return {
        "without": recall("published", quarter),
        "with": recall("published", f"{quarter}, means"),
        "mass": recall("published", mass),
        "mass_rows": kept("published", mass),
        "renewed": recall("generated", f"{quarter}, means"),
        "real_mass": lost(real, "generated", f"{mass}, means"),
        "real_rows": percent(rows[real, "generated", f"{mass}, means"]["kept"]),
        "real": lost(real, "generated", f"{quarter}, means"),
        "real_published": lost(real, "published", f"{quarter}, means"),
        "small": lost(small, "generated", f"{quarter}, means"),
        "small_published": lost(small, "published", f"{quarter}, means"),
    }


def _quarter(found: Found) -> Mapping[str, str]:
    """Take what a quarter of the rows costs running text, and what means and shares of the attention do about it."""
    right = [g["value"] for g in found["goals"] if "right next tokens in texts lost at 25%" in g["name"]]
    rows = {(row["text"], row["protocol"], row["arm"]): row for row in read("importance_means")["rows"]}
    small, real, quarter = "dialogues, 2.6 M", "WikiText-2, SmolLM2", "25% of the rows"

    def alike(text: str, protocol: str, arm: str) -> float:
        return float(rows[text, protocol, arm]["agreement"]["value"])

    def gains(text: str) -> str:
        found = [alike(text, p, f"{quarter}, means") - alike(text, p, quarter) for p in ("generated", "published")]
        return f"{min(found):.1f} to {max(found):.1f}"

    return {
        "right": f"{min(right):.1f} to {max(right):.1f}",
        "small_gains": gains(small),
        "real_gains": gains(real),
        "mass": f"{alike(real, 'generated', '95% of the attention'):.1f}",
        "mass_rows": percent(rows[real, "generated", "95% of the attention"]["kept"]),
        "quarter": f"{alike(real, 'generated', quarter):.1f}",
        "small_mass": f"{alike(small, 'generated', '50% of the attention'):.1f}",
        "small_mass_rows": percent(rows[small, "generated", "50% of the attention"]["kept"]),
        "small_quarter": f"{alike(small, 'generated', quarter):.1f}",
    }


def _real(found: Found) -> Mapping[str, str]:
    """Take what SmolLM2 gives, in %, from the rows of questions and texts."""
    shown: dict[str, str] = {}
    for row in found["rows"]:
        name = f"{row.get('mode')}_{100 * row.get('retention', 0):.0f}"
        if row["table"] == "choices" and row["text"] == "PIQA" and row["points"] is not None:
            points = row["points"]
            shown[f"piqa_{name}"] = f"{points['value']:+.1f} ± {1.96 * points['error']:.1f}"
            shown["questions"] = f"{row['questions']}"
        elif row["table"] == "quality" and row["mode"] != "exact":
            key = f"{row['protocol']}_{name}" if row["alpha"] == 0.6 else f"alpha_{row['alpha']:g}".replace(".", "_")
            shown[key] = f"{row['text_agreement']['value']:.0f}"
            shown[f"{key}_cost"] = f"{100 * (row['text_perplexity_ratio']['value'] - 1):.1f}"
    return shown


ENTRIES = (
    Missed(
        "importance_io",
        "Time to find the important rows, heads of 16",
        r"identification, share of TTFT",
        "A request of 32 tokens asks once in each layer, however wide its heads are, and heads of 16 leave little else to compute. Most of it "
        "is exponentials in layers that fall back to all heads: 4 ms each for 29 heads.",
        IN_C,
        "Wider heads: 3.6 % of TTFT at 64.",
    ),
    Missed(
        "importance_io",
        "Caches by score (+SC) and guesses (+SP), heads of 16",
        r"slow disk: .*\+SC( \+SP)?: TTFT over the step before",
        "On a CPU the device's memory is the host's, so that a chunk in it is no nearer, and more hits there (73 % instead of 43) gain nothing. "
        "The caches hold 17.5 and 56 % of the data, and leave 6 to 9 MB a request to read: there is little to hide guesses behind.",
        (
            "Take back guesses that turn out unwanted before they are read: 12 MB a request instead of 20. This is built.",
            "Guess only in layers where guesses were measured to help; one layer in eight tries the other way. This is built.",
            "All chunks of a layer in one call, wanted ones before guesses. This is built: guesses lengthen a request by 3 to 7 %, before by 7 to 8 (commit d7d1d04).",
        ),
        "Smaller caches and wider heads: with 5 and 10 % of the data and heads of 64 each step helps. A device with memory of its own (not measured).",
    ),
    Missed(
        "importance_io",
        "A disk of 2 GB/s, heads of 16",
        r"the disk as it is: (TTFT, loading everything|waiting for I/O|\+ITF \+RO( \+SC)?( \+SP)?: TTFT)",
        "The files come out of the system's page cache, at 2 GB/s and more. Loading a whole prefix takes 102 ms in all, mostly hidden behind "
        "computing. SPEC waits 7 to 8 ms in each of its forms. The same form measured twice took 118 and 115 ms.",
        (
            "Rows put together by importance: 6 MB instead of 13, and 5 % faster on such a disk.",
            "The engine's own choice (`--source auto`): it loads everything where it expects that to be faster.",
        ),
        "A disk that takes longer than the computing. SPEC is made for those.",
    ),
    Missed(
        "importance_sweep",
        "Time to find the important rows, grouped heads",
        r"^(grouped|smollm2).*identification, share of TTFT",
        "All query heads ask, but there are few KV heads: one for 8 query heads in `grouped`, one for 3 in SmolLM2. So there is as much to add up as in models "
        "with wide rows, and only an eighth or a third as much to read.",
        IN_C,
        "Heads that are not grouped: 1.5 to 6.3 % of TTFT at the same lengths and rates.",
    ),
    Missed(
        "importance_sweep",
        "A disk of 2 GB/s, heads of 64",
        r"^heads64, 8192 tokens, 2000 MB/s, .*(loading everything over SPEC|identification)",
        "All rows come in 135 ms, hidden behind computing. SPEC waits 56 ms, and computes and selects for 138 ms; 12 of these find the important rows, as at other rates.",
        (
            "Guesses ahead of the layer: 45 % of the reads hidden.",
            "Probe keys asked for two layers ahead: waits of 98 ms instead of 110 at 1 GB/s. This is built.",
        ),
        "A slower disk: at 1 GB/s SPEC is 1.21 times as fast as loading everything, at 200 MB/s 1.68 times.",
    ),
    Missed(
        "importance_sweep",
        "SmolLM2 at 500 MB/s, 4K tokens",
        r"^smollm2, 4096 tokens, 500 MB/s, .*loading everything over SPEC",
        "Its three KV heads are all probe heads, so that SPEC reads all keys: 136 of 190 MB. It waits 102 ms and computes for 332 ms. Loading everything takes 390 ms in all.",
        (
            "Take the keys of selected rows from the probe keys: 454 ms instead of 562. This is built.",
            "Probe keys asked for two layers ahead: waits of 100 ms instead of 125. This is built.",
        ),
        "A disk of 200 MB/s, where SPEC is 1.21 times as fast as loading everything. A model with more than three KV heads.",
    ),
    Missed(
        "importance_sweep",
        "Waiting for the disk, at some points of the sweep",
        r"^(heads64, 4096 tokens|heads64, .*chunks of 256|smollm2, (4096 tokens, 200|8064 tokens, 500) MB/s).*waiting for I/O",
        "At 4K tokens the caches hold more of each prefix: H2O finds half of its chunks there and reads 71 MB a request, SPEC reads 68 MB, 13 of them "
        "probe keys. In chunks of 256 rows selected rows lie in more bytes: 178 MB, for 127 with chunks of 16. With SmolLM2 both read all keys, and only a part of the "
        "values differs: 153 and 134 MB at 4K tokens.",
        (
            "Guesses ahead of the layer: 17, 11 and 55 % of the reads hidden.",
            "Caches by score: 68 % of the chunks are hits at 4K tokens, 51 % with LFU.",
            "Smaller chunks: a factor of 2.16 with 16 rows, 1.71 with 64 (8K tokens).",
        ),
        "More data than the caches hold, and more than three KV heads: 1.65 to 2.5 at 8K to 32K tokens with chunks of 64 rows.",
    ),
    Missed(
        "importance_sweep",
        "The engine's own choice between loading and selecting",
        r"auto over the fastest way",
        "At 2 GB/s the engine that chooses has files whose rows lie in order of importance. Loading all of them puts the rows back into order, in "
        "the thread that reads, and took 190 ms as well in another run. With `grouped` the cause is not known: in a run by itself the engine expected 365 ms of a "
        "load that takes 287, and 450 of selecting, so it loaded, at 1.05. In the full run it selected. Why was not searched further: it needs a quiet machine.",
        (
            "Learn what passes wait for: 1.31 became 1.05 (SmolLM2, 4K tokens). This is built.",
            "Put rows back with one copy instead of two: 1.6 to 3.8 ms instead of 5 to 15 for 17 MB. This is built.",
        ),
        "A slower disk and more bytes a row: 0.97 to 1.05 at all other points. An engine that lives longer than 20 requests, in which its slow first load counts.",
    ),
    Missed(
        "importance_means",
        "Running text over a quarter of the rows, with means",
        r"agreement lost at a quarter of the rows, with means",
        "A quarter of SmolLM2's rows holds 95 % of its attention. The other 5 % decide one token in sixteen, and one mean for each 64 rows does "
        "not bring that back. In `published` decoded tokens take no part in the selection, so their rows are missing whatever stands for them.",
        (
            "As many rows as hold 95 % of the attention ({real_rows} of them), with means: {real_mass} points lost instead of {real} (`generated`, SmolLM2).",
            "Means of only the rows that are left out: 1 to 3 points better (four prefixes). Not built, since each token would have to subtract the taken rows.",
            "Decoded tokens select anew (`generated`, the default): {real} points lost instead of {real_published} (SmolLM2), {small} instead of {small_published} (bundled model).",
        ),
        LARGER,
        figures=_means,
    ),
    Missed(
        "importance_means",
        "Facts recalled without renewal, a quarter of the rows with means",
        r"published: points of recall lost at a quarter of the rows, with means",
        "Decoded tokens retrieve a fact, and in `published` they take no part in the selection. The rows that they need are not among the "
        "quarter that the question selects: {without} % of the facts are recalled.",
        (
            "A mean for each 64 rows that are left out: {with} %.",
            "As many rows as hold 95 % of the attention ({mass_rows} of them): {mass} %.",
            "Decoded tokens select anew, which the goal rules out: {renewed} %, as many as with all rows. This is the default.",
        ),
        "Questions whose answer the prompt already attends to, as in the paper's tasks of one token.",
        figures=_means,
    ),
    Missed(
        "importance_quality",
        "Running text over a quarter of the rows",
        r"agreement in texts lost at 25%",
        "These small models spread their attention: half of it lies on 24 % of the bundled model's rows. A quarter of the rows is "
        "enough to look up facts, but not to predict every next word as all rows do. Nearly as many of the predicted words are right: {right} points fewer.",
        (
            "Eight variants of the selection (sinks and recent rows, pooling, all heads, ...): only more rows help.",
            "One mean key and value for what is left out of each 64 rows (`--importance-rest means`): the bundled model gains {small_gains} points, SmolLM2 {real_gains}.",
            "As many rows as hold a share of the attention (`--importance-mass`): with {mass_rows} of SmolLM2's rows {mass} % of next words are alike, with 25 % {quarter}; with {small_mass_rows} of the bundled model's {small_mass}, with 25 % {small_quarter}.",
        ),
        LARGER,
        figures=_quarter,
    ),
    Missed(
        "importance_quality",
        "Decoding over what the prompt selected (the paper's way), and SPI",
        r"published: (points of (recall lost at 50%|agreement in replies lost at 25%)|(recall|agreement in replies), SPEC - spi)",
        "The attention of decoded tokens retrieves a fact, and here it takes no part in the selection. Of all facts the full cache recalls {all} %; over "
        "50, 25 and 10 % of the rows SPEC recalls {spec} %, and SPI, whose rows were important to earlier requests, {spi} %. Where the reply's own attention takes part "
        "(`scored`) SPEC recalls {scored} %. Earlier questions serve better, since recall follows one row: of the prefix's rows (the first four apart) the one that the reply attends to most. With 50 % of the rows it is kept for 53 % of 73 facts where the "
        "question's own rows are selected (55 % recalled), and for 84 % by SPI (80 % recalled). Questions attend to the rows of all facts, in some layer, but a question does not attend most to the row that holds its own answer (five prefixes, scratch program).",
        (
            "Decoded tokens select anew (`--importance-renew 1`, the default): {renewed} % recalled at 50 % of the rows; SPI {renewed_spi} %.",
            "Every second token selects: 30 points of recall lost.",
            "The same 73 facts: one ranking of the question for all heads 68 %, a quarter of the rows by the question and a quarter by earlier ones (31 % of the rows in all) 71 %, rows of earlier questions with their replies 86 %. Not built, since tokens "
            "that select anew lose nothing.",
        ),
        "Questions whose answer the prompt already attends to, as in the paper's tasks of one token.",
        figures=_recalled,
    ),
    Missed(
        "importance_quality",
        "Running text: SPEC beside SPI and random rows",
        r"agreement in texts, SPEC - (spi|random)",
        "Next words of the dialogues' texts hardly depend on which rows are kept: over a quarter of the rows {spec} % are as with all rows for SPEC, "
        "{spi} for SPI, {random} for random rows, {sinks} for the first and last rows, and {h2o} for H2O. With stories260k SPEC has {s_spec}, SPI {s_spi}, and H2O, which "
        "selects for each head apart, {s_h2o}: one selection for all heads costs about a point.",
        (
            "Decoded tokens select anew (`generated`): {renewed} % for SPEC and {renewed_spi} for SPI on dialogues, {s_renewed} and {s_renewed_spi} on stories.",
            "Eight variants of the selection on these texts: none better with as many rows.",
        ),
        LARGER,
        figures=_alike,
    ),
    Missed(
        "importance_real",
        "Few-shot PIQA over a part of the rows, SmolLM2",
        r"^PIQA: points of accuracy lost",
        "A few of {questions} questions are decided otherwise than with all rows, and the interval of the difference holds both none and several points: {piqa_spec_50} at half "
        "of the rows, {piqa_spec_25} at a quarter.",
        (
            "Every layer selects head by head (H2O): {piqa_h2o_25} at a quarter of the rows.",
            "Rows that were important to earlier questions (SPI): {piqa_spi_25}.",
        ),
        "More questions: {questions} take 10 minutes of CPU time. All 1,838 would make the interval a quarter as wide.",
        figures=_real,
    ),
    Missed(
        "importance_real",
        "Running text over a quarter of the rows, SmolLM2",
        r"(agreement|right next tokens) in texts lost at 25%",
        "A quarter of the rows leaves out a little of the attention, which decides next words whose probabilities are close: {scored_spec_25} % are as with all rows, and perplexity rises by "
        "{scored_spec_25_cost} % (`scored`). In `published` the reply takes no part in the selection: {published_spec_25} %, and {published_spec_25_cost} % of perplexity.",
        (
            "Half of the rows: {scored_spec_50} % (`scored`) and {published_spec_50} % (`published`).",
            "More layers that select head by head (alpha 0.2, 0.4): {alpha_0_2} and {alpha_0_4} % (`scored`).",
            "Every layer selects head by head (H2O): {scored_h2o_25} and {published_h2o_25} %.",
        ),
        LARGER,
        figures=_real,
    ),
    Missed(
        "importance_real",
        "Texts decoded over what the prompt selected, beside SPI, SmolLM2",
        r"^WikiText-2, published: agreement in texts, SPEC - spi",
        "The reply's own attention takes no part in SPEC's selection here. Rows that were important to earlier stretches are wanted by it as well as those of the "
        "request's 32 tokens are: {published_spi_25} % of next tokens as with all rows, SPEC {published_spec_25} %.",
        (
            "The reply takes part (`scored`): SPEC {scored_spec_25} %, SPI {scored_spi_25} %.",
            "Every layer selects head by head (H2O): {published_h2o_25} %.",
        ),
        "Decoded tokens that select anew (the default), and longer requests.",
        figures=_real,
    ),
)
