"""Deep models under delay, in small: what is run, how it is tuned, what is kept, and what tables and verdicts say."""

import csv
import dataclasses
import math

import pytest
import torch

import lategrad as lg
from lategrad.delays.specs import parse
from lategrad.problems import LanguageProblem, ModuleProblem, load, load_text
from lategrad.registry import build_rule
from reproduction.deep import models, scores, study
from reproduction.deep.plan import CANDIDATES, PLANS, DeepSetting
from reproduction.deep.plan import DELAYS as ALL_DELAYS
from reproduction.deep.plan import RULES as ALL_RULES
from reproduction.deep.scores import DeepScores, best_position, final_scores, score_rule
from reproduction.deep.study import Deep, verdicts
from reproduction.report import write_report
from reproduction.study import Candidate, Plan, Workspace

UPDATES = 70


@pytest.fixture(scope="module", autouse=True)
def small_data(tmp_path_factory):
    """Digits instead of Fashion-MNIST, and a song instead of Shakespeare."""
    song = tmp_path_factory.mktemp("text") / "song.txt"
    song.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    text = load_text(song)

    def build_problem(model, batch, *, evaluate, micro_batch, layers, width):
        options = {"batch": batch, "evaluate": evaluate, "micro_batch": micro_batch}
        if model == "gpt":
            gpt = models.GPT(len(text.vocabulary), context=16, layers=layers, width=width, heads=2)
            return LanguageProblem(gpt, text, context=16, **options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = models.mlp(side=8, width=8) if model == "mlp" else models.cnn(side=8)
        return ModuleProblem(module, load("digits"), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_problem", build_problem)
        yield


RULES = ("adamw", "gap-aware", "synchronous-muon")
DELAYS = ("0", "8", "lognormal")
MLP = DeepSetting("mlp", UPDATES, 8, DELAYS, tuned_at=DELAYS, tuning_seeds=2, rules=RULES, evaluate=100)
GPT = DeepSetting("gpt", UPDATES, 4, DELAYS, tuned_at=("0",), rules=("muon", "synchronous-adamw"), evaluate=20,
                  layers=1, width=8, micro_batch=50)  # fmt: skip
TINY = Plan((MLP, GPT), CANDIDATES, seeds=2, lr_stride=2)


def scores_of(plan, setting, rule, out):
    (task,) = [t for t in plan.tasks(Workspace(out)) if (t.setting, t.candidate.rule) == (setting, rule)]
    return score_rule(task)


@pytest.fixture(scope="module")
def ran(small_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    said = []
    return out, Deep().section_of(TINY, Workspace(out, say=said.append)), said


def test_it_is_a_part_of_the_reproduction_at_every_scale():
    assert set(PLANS) == {"quick", "paper", "full"}
    for plan in PLANS.values():
        for setting in plan.settings:
            assert set(setting.tuned_at) <= set(ALL_DELAYS)
            own = [candidate.rule for candidate in getattr(setting, "candidates", ())]
            assert set(setting.rules) <= set(own or ALL_RULES)


@pytest.mark.filterwarnings("ignore:SteadyMuon without blocks")
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.rule)
def test_every_rule_has_nine_learning_rates_and_can_be_built(candidate):
    assert len(candidate.lrs) == 9
    assert candidate.lrs[-1] / candidate.lrs[0] == pytest.approx(1e4)
    rule = MLP.build(candidate, candidate.lrs)
    assert rule.query(rule.init(torch.zeros(3))).shape == (9, 3)


def test_pipemare_anneals_over_a_quarter_of_the_run():
    (pipemare,) = (candidate for candidate in CANDIDATES if candidate.rule == "pipemare")
    assert dataclasses.replace(MLP, updates=2000).build(pipemare, [0.1]).annealing == 500


def test_the_random_delays_have_the_mean_that_they_are_said_to_have():
    for name in ALL_DELAYS[:-1]:
        drawn = parse(str(MLP.delay_model(name))).draw(20_000, seed=0).delays
        assert drawn[1000:].double().mean().item() == pytest.approx(MLP.mean_delay(name), rel=0.03)


def test_what_is_measured_equals_plain_simulations(ran):
    _, section, _ = ran
    rows = [row for row in section.rows if row["rule"] == "adamw"]
    assert len(rows) == 3 * 5 * 2  # delays, learning rates, seeds
    for row in rows[::11]:
        rule = build_rule("adamw", row["lr"], lg.WholeSpace())
        alone = lg.simulate(MLP.problem(8), rule, MLP.delay_model(row["delay"]), UPDATES, seed=row["seed"])
        assert row["loss"] == pytest.approx(alone.loss[-1].item(), rel=1e-3)
        assert row["test_loss"] == pytest.approx(alone.test_loss[-1].item(), rel=1e-3)


@pytest.mark.parametrize(
    "rule", [rule if i % 2 else pytest.param(rule, marks=pytest.mark.slow) for i, rule in enumerate(ALL_RULES)]
)
def test_every_rule_goes_through_a_pipeline(rule, small_data, tmp_path):
    """The first stage has a delay of 64, the last none, and the rule is told 64."""
    setting = dataclasses.replace(MLP, updates=70, delays=("0", "pipeline"), tuned_at=("0",), rules=(rule,))
    result = scores_of(Plan((setting,), CANDIDATES, seeds=1, lr_stride=4), setting, rule, tmp_path)
    if result.candidate.synchronous:
        assert setting.rounds("pipeline") == 1
        return
    profile = setting.delay_model("pipeline")
    assert profile.delays == (64, 64, 0, 0)
    alone = lg.simulate(setting.problem(8), build_rule(rule, result.lr(), lg.WholeSpace()), profile, 70)
    if rule != "pipemare":  # which is annealed over a part of the run
        assert result.frozen["pipeline"].item() == pytest.approx(alone.accuracy[-1].item(), abs=0.02)


def test_an_anchor_has_as_many_gradients_and_as_many_rounds(ran):
    _, section, _ = ran
    anchors = [row for row in section.rows if row["rule"] == "synchronous-muon" and row["delay"] == "8"]
    assert {row["rounds"] for row in anchors} == {UPDATES // 9}
    for row in anchors[:3]:
        rule = lg.baselines.Muon(row["lr"], average="linear")
        alone = lg.simulate(MLP.problem(8 * 9), rule, 0, UPDATES // 9, seed=row["seed"])
        assert row["loss"] == pytest.approx(alone.loss[-1].item(), rel=1e-3)


def test_the_learning_rate_is_the_one_with_the_smallest_training_loss_of_the_first_seed(ran):
    out, section, _ = ran
    rows = [row for row in section.rows if row["model"] == "mlp" and row["rule"] == "gap-aware"]
    best = {
        delay: min(
            (row for row in rows if row["delay"] == delay and row["seed"] == 0),
            key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf,
        )["lr"]
        for delay in DELAYS
    }
    result = scores_of(TINY, MLP, "gap-aware", out)
    assert {delay: result.lr(delay) for delay in DELAYS} == pytest.approx(best)

    def accuracies(delay, lr):
        return [row["accuracy"] for row in rows if row["delay"] == delay and row["lr"] == pytest.approx(lr)]

    for delay in DELAYS:
        assert result.frozen[delay].tolist() == accuracies(delay, best["0"])
        assert result.tuned[delay].tolist() == accuracies(delay, best[delay])
    assert {row["lr"] for row in rows if row["frozen"]} == {best["0"]}


def test_where_nothing_is_tuned_only_the_frozen_learning_rate_is_run_with_all_seeds(ran):
    _, section, _ = ran
    rows = [row for row in section.rows if row["model"] == "gpt" and row["rule"] == "muon"]
    late = [row for row in rows if row["delay"] != "0"]
    assert {row["seed"] for row in late} == {0, 1}
    assert all(row["frozen"] for row in late)
    assert len(late) == 2 * 2
    assert len([row for row in rows if row["delay"] == "0"]) == 5 + 1  # all learning rates, and the frozen one again


def test_tables_show_the_rounds_the_rules_and_nothing_that_was_not_run(ran):
    out, section, _ = ran
    frozen, tuned = (section.tables[f"{GPT.title}, {protocol}"] for protocol in ("frozen", "tuned"))
    assert frozen[0] == {"rule": "rounds", "0": "70", "8": "7", "lognormal": "1", "spread": "", "lr": ""}
    assert [row["rule"] for row in frozen[1:]] == ["synchronous AdamW", "Muon"]
    assert all(row[delay] for row in frozen for delay in DELAYS)
    assert tuned[2]["8"] == tuned[2]["lognormal"] == ""
    assert frozen[1]["8"] == tuned[1]["8"]
    page = write_report([section], out, {}).read_text(encoding="utf-8")
    assert page.count("<img") == len(section.figures) == 3
    with (out / "deep.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(section.rows)


def test_the_drift_of_every_run_is_kept_and_shown(ran):
    """V of the simulator, for every learning rate; in the table that of the frozen ones, a mean over seeds."""
    _, section, _ = ran
    rows = [row for row in section.rows if (row["model"], row["rule"], row["delay"]) == ("mlp", "adamw", "8")]
    for row in rows:
        rule = lg.baselines.AdamW(row["lr"])
        alone = lg.simulate(MLP.problem(8), rule, 8, UPDATES, seed=row["seed"], drift=True)
        assert row["drift"] == pytest.approx(alone.certificate().drift.item(), rel=1e-3)
    shown = {row["rule"]: row for row in section.tables[f"{MLP.title}, drift"]}
    frozen = [row["drift"] for row in rows if row["frozen"]]
    assert shown["AdamW"]["8"] == f"{sum(frozen) / len(frozen):.2g}" != "0"
    assert shown["AdamW"]["0"] == shown["synchronous Muon"]["8"] == "0"
    late = [row for row in section.rows if row["model"] == "mlp" and row["drift"]]
    (ax, _) = section.figures["deep-drift"].axes
    drawn = [point for marks in ax.collections for point in marks.get_offsets() if point[0] > 0]
    assert len(drawn) == len(late) > 0


def test_what_is_finished_is_not_run_again_and_can_be_made_in_pieces(ran, tmp_path):
    out, first, said = ran
    before = len(said)
    assert Deep().section_of(TINY, Workspace(out, say=said.append)).tables == first.tables
    assert len(said) == before
    pieces = []
    for rule in ("muon", "synchronous-adamw"):
        Deep().section_of(TINY.limited(["gpt"], [rule]), Workspace(tmp_path, say=pieces.append))
    whole = Deep().section_of(TINY.limited(["gpt"], []), Workspace(tmp_path, say=pieces.append))
    assert len(pieces) == len([line for line in said if "gpt" in line])
    name = f"{GPT.title}, frozen"
    assert whole.tables[name] == first.tables[name]


def test_delays_that_do_not_fit_together_are_run_apart_with_the_same_result(ran, tmp_path, monkeypatch):
    _, first, _ = ran
    monkeypatch.setitem(scores.HISTORY_BYTES, "cpu", 1)
    said = []
    apart = Deep().section_of(TINY.limited(["mlp"], ["adamw"]), Workspace(tmp_path, say=said.append))
    assert len(said) == 3
    want = [row for row in first.rows if row["rule"] == "adamw"]
    for got, row in zip(apart.rows, want, strict=True):
        assert got["loss"] == pytest.approx(row["loss"], rel=1e-4)


def test_a_model_that_takes_long_is_run_when_it_is_named():
    quick = PLANS["quick"]
    assert [setting.model for setting in quick.limited([], []).settings] == ["mlp"]
    assert [setting.model for setting in quick.limited(["gpt"], ["adamw"]).settings] == ["gpt"]


def made_up(name, frozen, by_loss=False, **options):
    """A rule with one score for each delay, and the same for five learning rates around."""
    values = {delay: torch.tensor([score], dtype=torch.float64) for delay, score in frozen.items()}
    grids = {delay: torch.full((1, 5), score.item(), dtype=torch.float64) for delay, score in values.items()}
    candidate = Candidate(name, (1.0, 2.0, 3.0, 4.0, 5.0), **options)
    return DeepScores(candidate, by_loss, dict.fromkeys(frozen, 2), grids, values, {}, [])


def panel(*results):
    return {result.candidate.rule: result for result in results}


CONSTANT = ("0", "8", "64", "256")
LATE_MLP = dataclasses.replace(MLP, delays=CONSTANT)


def at(*scores):
    return dict(zip(CONSTANT, scores, strict=True))


def test_verdicts_follow_the_numbers():
    ours = made_up("steady-muon", at(0.88, 0.88, 0.87, 0.86), ours=True)
    anchor = made_up("synchronous-muon", at(0.89, 0.89, 0.872, 0.862), synchronous="muon")
    baseline = made_up("adamw", at(0.883, 0.87, 0.5, 0.84))
    found = {v.claim: v for v in verdicts(LATE_MLP, panel(ours, anchor, baseline), True)}
    ahead, near, wide, lost = found.values()
    assert not ahead.holds  # by .02 alone at 256
    assert "AdamW by 0.020 at 256" in ahead.measured
    assert not near.holds  # .01 behind at 8
    assert "+0.010 at 8, +0.002 at 64" in near.measured
    assert wide.holds
    assert lost.holds
    better = made_up("steady-muon", at(0.88, 0.888, 0.872, 0.88), ours=True)
    assert all(v.holds for v in verdicts(LATE_MLP, panel(better, anchor, baseline), True))


def test_a_loss_is_better_when_it_is_smaller():
    ours = made_up("steady-muon", at(1.3, 1.4, 1.7, 2.5), by_loss=True, ours=True)
    anchor = made_up("synchronous-muon", at(1.3, 1.3, 1.6, 2.45), by_loss=True, synchronous="muon")
    baseline = made_up("adamw", at(1.29, 1.8, 3.2, 14.0), by_loss=True)
    ahead, near, _, lost = verdicts(dataclasses.replace(GPT, delays=CONSTANT), panel(ours, anchor, baseline), True)
    assert ahead.holds
    assert not near.holds  # .1 at 8, where .05 is allowed
    assert lost.holds
    assert [r.candidate.rule for r in study.ranked(panel(baseline, ours, anchor))] == [
        "synchronous-muon", "steady-muon", "adamw",
    ]  # fmt: skip


def test_a_learning_rate_at_the_end_of_its_grid_is_marked():
    result = dataclasses.replace(made_up("adamw", {"0": 0.8}), choice={"0": 4})
    setting = dataclasses.replace(MLP, delays=("0",))
    assert study.table(setting, panel(result), "frozen")[1]["lr"] == "5 (end)"


def test_what_diverged_has_no_accuracy_and_an_infinite_loss(ran):
    out, _, _ = ran
    trace = scores_of(TINY, MLP, "adamw", out).traces[0]
    loss = trace.loss.clone()
    loss[..., 1] = torch.nan
    broken = dataclasses.replace(trace, loss=loss)
    assert (final_scores(broken, by_loss=False)[:, 1] == 0).all()
    assert (final_scores(broken, by_loss=True)[:, 1] == torch.inf).all()
    assert best_position(broken) != 1
