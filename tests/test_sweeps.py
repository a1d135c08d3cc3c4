"""Sweeps of N that are partly measured: what is read, what is predicted, what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from eval import sweeps
from eval.sweeps import HEADER, Panel, Point
from tests.commands import command, refusal

NS = (1, 2, 3, 4, 5, 6, 7)


def curve(n: int, *, first: float = 0.9, fall: float = 0.97, with_n: float = 0.04) -> tuple[float, ...]:
    """Survival where acceptance falls by position and with N as the model says it does."""
    found, stands = [], 1.0
    for k in range(n):
        stands *= first * fall**k * n**-with_n
        found.append(stands)
    return tuple(found)


def panel(
    cost=lambda n: 1.2 + 0.15 * n, *, ns=NS, baseline=1000.0, name=("m", "Method", "set"), **how
) -> Panel:
    """A panel whose rounds cost what ``cost`` says, in plain rounds."""
    points = [Point(n, (1 + sum(curve(n, **how))) * baseline / cost(n), curve(n, **how)) for n in ns]
    return Panel(*name, baseline, tuple(points))


def partly(whole: Panel, *measured: int) -> Panel:
    return replace(whole, points=tuple(p if p.n in measured else Point(p.n, None, ()) for p in whole.points))


def rates(whole: Panel) -> dict[int, float]:
    return {0: whole.baseline, **whole.measured}


# Predicting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [(1, 4), (1, 7), (3, 5), (2, 4, 6)])
def test_acceptance_at_other_numbers_of_drafts_follows_from_two_curves(measured):
    known = {n: curve(n) for n in measured}
    for n in NS:
        assert sweeps.survival(known, n) == pytest.approx(curve(n), rel=1e-6), n


def test_one_curve_goes_on_as_it_fell_and_never_rises():
    assert sweeps.survival({4: curve(4, with_n=0)}, 7) == pytest.approx(curve(7, with_n=0), rel=1e-6)
    assert sweeps.survival({4: curve(4)}, 2) == pytest.approx(curve(4)[:2])
    rising = sweeps.survival({4: (0.5, 0.3, 0.25, 0.24)}, 9)
    assert rising == sorted(rising, reverse=True)
    assert len(rising) == 9


def test_a_line_that_is_measured_twice_gives_every_rate():
    whole = panel()
    (found,) = sweeps.predict([partly(whole, 1, 4)])
    assert found == pytest.approx(rates(whole), rel=0.03)


def test_noise_of_one_figure_is_shared_among_panels_of_a_model_and_method():
    """Six sets on one line of costs, each figure off by 4 %: alone they err more than together."""
    chance = random.Random(0)
    wholes = [panel(name=("m", "Method", f"set {at}"), first=0.9 - 0.02 * at) for at in range(6)]
    noisy = []
    for whole in wholes:
        points = [
            replace(p, rate=p.rate and p.rate * (1 + chance.choice((-0.04, 0.04))))
            for p in partly(whole, 1, 4).points
        ]
        noisy.append(replace(whole, points=tuple(points)))

    def error(found):
        return sum(abs(f[n] / rates(w)[n] - 1) for f, w in zip(found, wholes, strict=True) for n in (5, 6, 7))

    assert error(sweeps.predict(noisy)) < 0.8 * error([sweeps.predict([one])[0] for one in noisy])


def test_other_models_and_methods_do_not_bend_a_line():
    whole = panel()
    dear = panel(lambda n: 4 + 0.5 * n, name=("other", "Other", "set"))
    (found, _) = sweeps.predict([partly(whole, 1, 4), dear])
    assert found == pytest.approx(rates(whole), rel=0.03)


def test_more_drafts_never_make_a_round_cheaper_and_none_is_cheaper_than_a_plain_one():
    falls = panel(lambda n: 1.6 - 0.2 * n, ns=(1, 2, 3, 4, 5))
    (found,) = sweeps.predict([partly(falls, 1, 3)])
    tau = sweeps.taus(partly(falls, 1, 3))
    costs = [round(tau[n] * 1000 / found[n], 9) for n in (1, 2, 3, 4, 5)]
    assert costs == sorted(costs)
    assert costs[0] >= 1


# Picking ------------------------------------------------------------------------------------------


def test_the_pick_is_the_fastest_or_not_to_draft():
    pays, dear = panel(), panel(lambda n: 3 + 0.9 * n, name=("m", "dear", "set"))
    some = [partly(pays, 1, 4), partly(dear, 1, 4)]
    first, second = sweeps.plan(some)["panels"]
    best = rates(pays)
    assert best[first["pick"]] > 0.98 * max(best.values())
    assert first["predicted"].keys() == {str(n) for n in NS}
    assert second["pick"] == 0
    assert second["gain"] == 1


def test_the_command_leaves_a_plan_a_picture_and_a_page(tmp_path, capsys):
    file = written(tmp_path, [partly(panel(), 1, 4), partly(panel(name=("m", "Other", "set")), 2, 5)])
    assert command("eval", "task=plan", f"observed={file}", f"out={tmp_path / 'plan'}") == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert found == json.loads(json.dumps(sweeps.plan(sweeps.read(file))))
    assert [p["method"] for p in found["panels"]] == ["Method", "Other"]
    assert (tmp_path / "plan" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert "data:image/png" in (tmp_path / "plan" / "plan.html").read_text()
    assert "1*: " in out
    assert "2: " in out
    assert command("eval", "task=plan", f"observed={file}", f"out={tmp_path / 'mine.json'}") == 0
    assert json.loads((tmp_path / "mine.json").read_text()) == found


# Reading ------------------------------------------------------------------------------------------


def row(point: Point, of: Panel, **other: str) -> str:
    given = {
        "model": of.model,
        "method": of.method,
        "dataset": of.dataset,
        "baseline_tok_s": f"{of.baseline:g}",
        "n": str(point.n),
        "speedup": f"{point.rate / of.baseline:.2f}" if point.rate else "",
        "tok_s": f"{point.rate:.1f}" if point.rate else "",
        "mean_acceptance_length": f"{1 + sum(point.survival):.2f}" if point.survival else "",
        "acceptance_rate_pct": "",
        "survival_per_position": " ".join(f"{x:.3f}" for x in point.survival),
    }
    return "|".join({**given, **other}.values())


def written(folder: Path, panels: list[Panel], **other: str) -> Path:
    """A file of panels; ``other`` replaces values of its last row."""
    rows = [(point, each) for each in panels for point in each.points]
    lines = [row(*pair) for pair in rows[:-1]] + [row(*rows[-1], **other)]
    file = folder / "sweep.csv"
    file.write_text("\n".join(["|".join(HEADER), *lines]) + "\n")
    return file


def test_what_was_written_is_read(tmp_path):
    some = [partly(panel(), 1, 4), panel(name=("n", "Other", "set"))]
    found = sweeps.read(written(tmp_path, some))
    assert [(p.model, p.method, p.dataset, p.baseline) for p in found] == [
        (p.model, p.method, p.dataset, p.baseline) for p in some
    ]
    for got, want in zip(found, some, strict=True):
        assert got.measured == pytest.approx(want.measured, rel=1e-4)
        assert [p.n for p in got.points] == [p.n for p in want.points]


def test_what_a_spreadsheet_adds_is_no_part_of_a_cell(tmp_path):
    """A mark at the beginning, spaces around cells, other line ends."""
    file = written(tmp_path, [panel()])
    found = sweeps.read(file)
    text = file.read_text().replace("|", " | ").replace("\n", "\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert sweeps.read(file) == found


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"tok_s": "0"}, "tok_s=0 is impossible"),
        ({"mean_acceptance_length": "0.5", "survival_per_position": ""}, "gives 1 to"),
        ({"mean_acceptance_length": "99", "survival_per_position": ""}, "gives 1 to"),
        ({"tok_s": "-3"}, "tok_s=-3 is impossible"),
        ({"tok_s": "nan"}, "tok_s=nan is impossible"),
        ({"tok_s": "fast"}, "tok_s='fast' is no number"),
        ({"baseline_tok_s": ""}, "baseline_tok_s='' is no number"),
        ({"baseline_tok_s": "999"}, "baseline_tok_s=999, but 1000"),
        ({"n": "0"}, "without drafts stands in baseline_tok_s"),
        ({"n": "1000000000000"}, "give a whole number of drafts from 1 to"),
        ({"n": "1e308"}, "give a whole number of drafts from 1 to"),
        ({"tok_s": "1e-300"}, "times the baseline"),
        ({"acceptance_rate_pct": "350"}, "acceptance_rate_pct=350 is more than all"),
        ({"tok_s": "", "survival_per_position": "", "speedup": "fast"}, "speedup='fast' is no number"),
        ({"n": "2.5"}, "n=2.5; give a whole number"),
        ({"n": "1", "survival_per_position": ".9", "mean_acceptance_length": ""}, "n=1 of m Method set"),
        ({"survival_per_position": ".9 .8"}, "2 survivals for n=7"),
        ({"survival_per_position": ".9 .8 .7 .75 .5 .4 .3"}, "survival rises from 0.7 to 0.75 at position 4"),
        ({"survival_per_position": "1.1 .8 .7 .6 .5 .4 .3"}, "survival rises from 1 to 1.1 at position 1"),
        ({"survival_per_position": ".9 .8 .7 .6 .5 .4 -.1"}, "survival_per_position=-.1 is impossible"),
        ({"speedup": "9.9"}, "speedup=9.9, but the other columns make it"),
        ({"mean_acceptance_length": "7.5"}, "mean_acceptance_length=7.5, but the other columns make it"),
        ({"model": ""}, "no model"),
        ({"dataset": "another"}, "m Method another has 1 rows with a tok_s"),
        ({"model": "m|x"}, "11 columns, the header has 10"),
    ],
)  # fmt: skip
def test_an_impossible_row_is_refused_by_its_line(tmp_path, other, words):
    file = written(tmp_path, [panel()], **other)
    with pytest.raises(ValueError, match="sweep.csv:8") as refused:
        sweeps.read(file)
    assert words in str(refused.value)


def test_a_panel_needs_two_rates_and_a_curve(tmp_path):
    with pytest.raises(ValueError, match=r"sweep.csv:2: m Method set has 1 rows with a tok_s"):
        sweeps.read(written(tmp_path, [partly(panel(), 4)]))
    bare = replace(panel(), points=tuple(replace(p, survival=()) for p in panel().points))
    with pytest.raises(ValueError, match="has no survival_per_position"):
        sweeps.read(written(tmp_path, [bare]))


def test_a_dollar_in_a_name_is_a_dollar_in_the_picture():
    """Two of them would be a formula, and this one is none."""
    found = sweeps.plan([replace(partly(panel(), 1, 4), model="a$b_{$c")])
    assert sweeps.draw(found).startswith(b"\x89PNG")


def test_a_file_that_is_no_sweep_is_refused(tmp_path):
    file = tmp_path / "sweep.csv"
    with pytest.raises(ValueError, match="No such file"):
        sweeps.read(file)
    file.write_text("model,method\n")
    with pytest.raises(ValueError, match=r"sweep.csv:1: no column model, method, dataset"):
        sweeps.read(file)
    file.write_text("|".join(HEADER[::-1]) + "\n")
    with pytest.raises(ValueError, match=r"sweep.csv:1: columns in another order"):
        sweeps.read(file)
    file.write_text("|".join(HEADER) + "\n" + "x" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"sweep.csv:2: field larger"):
        sweeps.read(file)
    file.write_text("|".join(HEADER) + "\n\n")
    with pytest.raises(ValueError, match="holds no row"):
        sweeps.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="name a file of text"):
        sweeps.read(file)


def test_the_command_refuses_with_the_row(tmp_path, capsys):
    file = written(tmp_path, [panel()], tok_s="0")
    assert f"{file}:8: tok_s=0" in refusal(capsys, "eval", "task=plan", f"observed={file}")
    both = refusal(capsys, "eval", "task=plan", f"observed={file}", "drafter=DIR")
    assert "a sweep is planned alone" in both
