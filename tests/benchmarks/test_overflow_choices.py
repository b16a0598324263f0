"""How a choice is picked, and by which rule: on losses that are written here."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.papers import page_choices
from benchmarks.papers.cachedattention.overflow import choice_rows, choices, picks
from benchmarks.papers.cachedattention.overflow.choice_rows import ALONE, COMPARED, OWN, VALIDATION

# The first choice is long, the second a likely word, and the third right.
LOSSES, OF = [12.0, 4.0, 5.0], picks.Choices(own=[14.0, 4.0, 9.0], tokens=[6, 1, 1], characters=[24, 2, 5], answer=2)


@pytest.mark.parametrize(
    ("less_own", "per", "picked"),
    [
        (False, "choice", 1),
        (False, "token", 0),
        (False, "character", 0),
        (True, "choice", 2),
        (True, "token", 2),
        (True, "character", 2),
    ],
)
def test_a_rule_picks_by_what_its_name_says(less_own: bool, per: picks.Per, picked: int) -> None:
    assert picks.Rule(less_own, per).pick(LOSSES, OF) == picked


def test_the_rule_is_the_one_that_is_right_most_often() -> None:
    other = picks.Choices(own=[0.0, 9.0], tokens=[4, 1], characters=[9, 9], answer=0)
    right = picks.validated([(LOSSES, OF), ([8.0, 3.0], other)])
    assert right.keys() == {rule.name for rule in picks.RULES}
    assert right["loss per choice"] == 0
    assert right["loss per token"] == right["loss less the own loss per token"] == 50
    assert picks.best(right).name == "loss per token", "the first of equal ones"


def part(arm: str, number: int | str, losses: list[list[float]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"text": "a", "arm": arm, "part": number, "losses": losses}
    if arm == OWN:
        facts |= {"numbers": [0, 1], "answers": [0, 1], "tokens": [[1, 2]] * 2, "characters": [[3, 9]] * 2}
    return facts


RIGHT, WRONG = [1.0, 3.0], [3.0, 1.0]  # where the first choice is


def test_rows_are_of_questions_that_did_not_choose_the_rule() -> None:
    own = [[0.0, 4.0], [0.0, 4.0]]  # taken off, the second choice wins always
    parts = [part(OWN, VALIDATION, own), part(ALONE, VALIDATION, [RIGHT, WRONG])]
    assert choice_rows.rows(parts) == [], "nothing is reported yet"
    for number in (0, 1):
        parts.append(part(OWN, number, own))
        parts += [part(arm, number, [RIGHT, WRONG] if arm != "CA" or number else [WRONG, WRONG]) for arm in COMPARED]
    parts.append(part("CA", 2, [WRONG, WRONG]))  # other arms have not come so far
    (row,) = choice_rows.rows(parts)
    assert (row["rule"], row["parts"], row["questions"], row["chance"]) == ("loss per choice", 2, 4, 50)
    assert row["validation"]["questions"] == 2
    assert row["validation"]["right"]["loss less the own loss per choice"] == 50
    assert row["accuracy"]["TT"]["value"] == 100
    assert row["points"]["CA"] == {"value": -25.0, "error": 25.0}
    assert row["same_choice"] == {"CA": 75, "TT": 100, "NKVT": 100, "none": 100, ALONE: 100}
    assert row["above_chance"] == {"CA": False, "TT": True, "NKVT": True, "none": True, ALONE: True}
    (first,) = choice_rows.rows([p for p in parts if p["part"] in (0, VALIDATION)])
    assert not any(first["above_chance"].values()), "one part has no error"
    (goal,) = choice_rows.goals([row])
    assert (goal["value"], goal["met"], goal["within_noise"]) == (25, False, True)
    swapped = [p | {"losses": [WRONG, RIGHT]} if (p["arm"], p["part"]) == (ALONE, VALIDATION) else p for p in parts]
    (row,) = choice_rows.rows(swapped)
    assert row["rule"] == "loss less the own loss per choice", "validation decides, the reported questions do not"
    assert row["accuracy"]["TT"]["value"] == 50


def test_the_page_shows_the_table_and_what_it_can_tell() -> None:
    own = [[0.0, 4.0], [0.0, 4.0]]
    parts = [part(OWN, VALIDATION, own), part(ALONE, VALIDATION, [RIGHT, WRONG])]
    for number in (0, 1):
        parts.append(part(OWN, number, own))
        parts += [part(arm, number, [WRONG, RIGHT] if arm == "none" else [RIGHT, WRONG]) for arm in COMPARED]
    settings = {"window": 2048, "overflows": 5}
    text = page_choices.choices({"rows": choice_rows.rows(parts), "settings": settings})
    sure = "100.0 ± 0.0"
    assert f"| a | 4 | 50 | {sure} | {sure} | {sure} | 0.0 ± 0.0 | {sure} | 0.0 ± 0.0 | 0.0 ± 0.0 | 100 |" in text
    assert "a: loss per choice (100 % of 2 right)" in text
    assert "TT is in these: a. NKVT is in these: a. The history helps TT in these: a." in text
    one = [each for each in parts if each["part"] != 1]
    text = page_choices.choices({"rows": choice_rows.rows(one), "settings": settings})
    assert "TT is in these: none. NKVT is in these: none. The history helps TT in these: none." in text, "no error"
    for each in parts:
        if each["arm"] not in (OWN, ALONE):
            each["losses"] = [RIGHT, RIGHT]
    text = page_choices.choices({"rows": choice_rows.rows(parts), "settings": settings})
    assert "TT is in these: none. NKVT is in these: none. The history helps TT in these: none." in text


def test_topics_of_other_records_are_none_of_this_one() -> None:
    names = [("sea", "sky"), ("sky", "sea"), ("art", "sky"), ("law", "sky"), ("war", "sky"), ("tax", "sky")]
    questions = [choices.Question("?", "?", (f" {a}", f" {b}"), 0, ("r",)) for a, b in names]
    found = choices.among_others(questions)
    assert found[0].choices == (" sea", " art", " law", " war", " tax")
    assert found[4].choices == (" war", " tax", " sea", " art", " law"), "round the end of the file"
    assert {each.answer for each in found} == {0}
    with pytest.raises(ValueError, match="3 topics of other records, 4 are needed"):
        choices.among_others(questions[:5])
