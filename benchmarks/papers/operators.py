"""The operator models beside what their papers print: RelayAttention, SPEC (IMPRESS) and AttnCache.

Every row has a figure or table, the paper's value, the model's, the deviation where both are numbers, and whether the value
was fitted. Nothing is measured: no device is needed, and the same seed gives the same numbers.

    python -m benchmarks.papers.operators [--json FILE]     # then python -m benchmarks.plots operators
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from benchmarks.papers.attncache.modelled import attncache
from benchmarks.papers.modelled_rows import FITTED, Row
from benchmarks.papers.relay.modelled import figure_1, figure_5, figure_6, figure_7, figure_8, table_3, table_4
from benchmarks.papers.spec.modelled import spec_3, spec_16_to_21, spec_25, spec_sensitivity, spec_tail


def main(args: list[str]) -> int:
    options = arguments("python -m benchmarks.papers.operators", __doc__ or "").parse_args(args)
    rows = [*figure_1(), *figure_5(), *figure_6(options.seed), *figure_7(options.seed), *figure_8()]
    rows += [*table_3(options.seed), *table_4(options.seed), *spec_3()]
    found, times = spec_16_to_21()
    rows += [*found, *spec_tail(), *spec_25(), *spec_sensitivity(), *attncache()]
    for figure in dict.fromkeys(r["figure"] for r in rows):
        chosen = [r for r in rows if r["figure"] == figure]
        show(figure, ("", "paper", "simulated", "deviation", ""), [_shown(r) for r in chosen])
    finish(options, rows, goals(rows), times=times)
    return 0


def _shown(found: Row) -> tuple[str, ...]:
    unit = "pt" if " %" in found["what"] else "%"
    deviation = "" if found["deviation"] is None else f"{100 * found['deviation']:+.0f} {unit}"
    paper, simulated = (f"{x:g}" if isinstance(x, float) else str(x) for x in (found["paper"], found["simulated"]))
    return found["what"], paper, simulated, deviation, found["note"]


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How far the models are off, figure by figure; fitted values and others apart."""

    def worst(figure: str, fitted: bool) -> float:
        chosen = [r for r in rows if r["figure"] == figure and r["deviation"] is not None]
        chosen = [r for r in chosen if r["note"].startswith(FITTED) == fitted and r["note"] != "sensitivity"]
        return max(float(abs(r["deviation"])) for r in chosen)

    return [
        goal(
            "RelayAttention Fig. 1, largest deviation (fitted)",
            worst("RelayAttention Fig. 1", True),
            0.1,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 5, largest deviation",
            worst("RelayAttention Fig. 5", False),
            0.1,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 6, largest deviation (fitted)",
            worst("RelayAttention Fig. 6", True),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 7, largest deviation",
            worst("RelayAttention Fig. 7", False),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 8, largest deviation",
            worst("RelayAttention Fig. 8", False),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Table 3, largest deviation",
            worst("RelayAttention Table 3", False),
            0.25,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Table 4, largest deviation",
            worst("RelayAttention Table 4", False),
            0.25,
            least=False,
            spread=COUNTED,
        ),
        goal("SPEC Fig. 3, largest difference", worst("SPEC Fig. 3", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC Fig. 16, ends of the range (fitted)", worst("SPEC Fig. 16", True), 0.2, least=False, spread=COUNTED),
        goal("SPEC Fig. 18, largest difference", worst("SPEC Fig. 18", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC Fig. 21, largest difference", worst("SPEC Fig. 21", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC p99, largest deviation", worst("SPEC VI-B, p99", False), 0.3, least=False, spread=COUNTED),
        goal(
            "AttnCache Table 1, largest deviation", worst("AttnCache Table 1", False), 0.1, least=False, spread=COUNTED
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
