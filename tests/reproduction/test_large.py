"""The large GPT in small: its tokens, its plain loop with optimizers of `lategrad.optim`, and its part of the study."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lategrad as lg
from lategrad.delays import by_stage
from lategrad.delays.specs import parse
from lategrad.problems.minibatches import Minibatches
from lategrad.rules.blocks import Blocks
from reproduction.deep import large
from reproduction.deep.large import LargeGPT, mean_loss, warm_up_and_decay
from reproduction.deep.plan import CANDIDATES, PLANS, SMALL_PIPELINE_CANDIDATES, LargeSetting, PipelineSetting
from reproduction.deep.scores import slowdown
from reproduction.deep.study import Deep
from reproduction.report import write_report
from reproduction.study import Plan, Workspace
from reproduction.text import Tokens, load_tokens, tokens_file

CONTEXT, LETTERS = 8, 40
SIZES = {"batch": 4, "context": CONTEXT, "evaluate": 20}


def train(*run, **options):
    """The losses at the end."""
    (losses,) = large.train(*run, **options)
    return losses


def gpt(seed=0):
    return LargeGPT(LETTERS, CONTEXT, layers=2, width=16, heads=2, seed=seed)


@pytest.fixture(scope="module")
def tokens():
    """A pattern with noise: something to learn."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.arange(3_000) * 7 % LETTERS + torch.randint(2, (3_000,), generator=generator)) % LETTERS
    return Tokens(numbers[:2_500].short(), numbers[2_500:].short(), "made up")


# ---- Tokens


@pytest.fixture(scope="module")
def sources():
    """Real files of the standard library, a few of which are held out."""
    make_tokens = pytest.importorskip("scripts.make_tokens", exc_type=ImportError)
    every = make_tokens.read_sources()
    chosen = {inside: every[inside] for inside in sorted(every) if inside.startswith("json/") or inside == "ast.py"}
    held_out = {inside: every[inside] for inside in [i for i in every if make_tokens.is_held_out(i)][:2]}
    return make_tokens, chosen | held_out, every


def test_tokens_are_the_files_again_with_a_tenth_of_the_files_held_out(sources, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    make_tokens, files, every = sources
    share = sum(map(make_tokens.is_held_out, every)) / len(every)
    assert 0.08 < share < 0.12
    assert not any({"tests", "site-packages"} & set(inside.split("/")) for inside in every)
    monkeypatch.setenv("LATEGRAD_DATA", str(tmp_path))
    path = tmp_path / tokens_file().name
    make_tokens.write_tokens(files, path, vocabulary=600)
    tokens = load_tokens()
    with safe_open(path, "pt") as file:
        tokenizer = tokenizers.Tokenizer.from_str(file.metadata()["tokenizer"])
    for part, held_out in ((tokens.train, False), (tokens.held_out, True)):
        texts = [content for inside, content in files.items() if make_tokens.is_held_out(inside) == held_out]
        decoded = tokenizer.decode(part.tolist(), skip_special_tokens=False)
        assert decoded == "".join(content + make_tokens.END for content in texts)
    assert int(tokens.train.max()) < 600


def test_tokens_are_found_in_ones_own_folder_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LATEGRAD_DATA", str(tmp_path / "own"))
    with pytest.raises(FileNotFoundError, match=r"run `make tokens`.*or put that file into the folder LATEGRAD_DATA"):
        load_tokens()
    sums = []
    for number, path in enumerate((tokens_file(), tmp_path / "own" / tokens_file().name)):
        path.parent.mkdir(parents=True)
        save_file({"train": torch.full((5,), number).short(), "held_out": torch.zeros(3).short()}, path)
        assert load_tokens().train.tolist() == [number] * 5
        sums.append(load_tokens().sha256)
    assert sums[0] != sums[1]  # so that runs on one text are not taken for runs on another


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": torch.zeros(3).short()}, "has no tokens .'held_out'.: delete it, then run `make tokens`"),
        ({"train": torch.tensor([9000]).short(), "held_out": torch.zeros(3).short()}, "must be below 8192.*got 9000"),
        (None, "has no tokens .*: delete it, then run `make tokens`"),
    ],
)
def test_a_file_without_tokens_is_refused(parts, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LATEGRAD_DATA", str(tmp_path))
    path = tmp_path / tokens_file().name
    path.write_bytes(b"damaged") if parts is None else save_file(parts, path)
    with pytest.raises(ValueError, match=message):
        load_tokens()


# ---- The loop


def batches_of(tokens, seed=0, batch=4):
    """Inputs and targets as a user would cut them, from the same places."""
    for number in range(10**6):
        (places,) = Minibatches(len(tokens.train) - CONTEXT, batch).draw(seed, number, 1)
        windows = torch.stack([tokens.train[place : place + CONTEXT + 1].long() for place in places.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def test_without_delay_it_is_a_plain_loop_of_torch(tokens):
    updates, lr = 40, 0.01
    found = train(gpt().double(), tokens, lg.baselines.AdamW(lr), 0, updates=updates, **SIZES)
    model = gpt().double()  # rounding of float32 grows to 1e-4 in 40 updates
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    scheduler = LambdaLR(optimizer, lambda done: min((done + 1) / 2, (updates - done) / (updates - 2)))
    for _, (inputs, targets) in zip(range(updates), batches_of(tokens), strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
    assert found.updates == updates
    for loss, part in ((found.train, tokens.train), (found.held_out, tokens.held_out)):
        assert loss == pytest.approx(mean_loss(model, part.long(), CONTEXT, 20), abs=1e-5)
        assert loss < math.log(LETTERS) - 0.25  # it has learned something


def test_the_learning_rate_rises_over_a_twentieth_and_falls_to_zero():
    rates = [warm_up_and_decay(200, done) for done in range(201)]
    assert rates[:10] == pytest.approx([(done + 1) / 10 for done in range(10)])
    assert max(rates) == 1.0
    assert rates[-1] == 0.0
    assert all(after < before for before, after in pairwise(rates[10:]))
    assert [warm_up_and_decay(1, done) for done in (0, 1)] == [1.0, 0.0]


@pytest.fixture
def steps():
    """What every update of an optimizer of rules was given: its learning rate and its delay."""
    given = []

    def note(optimizer, args, options):
        if isinstance(optimizer, large.FromRule):
            given.append((optimizer.param_groups[0]["lr"], options["delay"]))

    hook = register_optimizer_step_pre_hook(note)
    yield given
    hook.remove()


@pytest.mark.parametrize("delays", [0, 3, "lognormal:1,1"])
def test_every_delay_makes_the_updates_each_with_its_own_learning_rate(tokens, delays, steps):
    updates, passes = 60, []
    model = gpt()
    model.register_forward_hook(lambda *_: passes.append(1) if torch.is_grad_enabled() else None)
    found = train(model, tokens, lg.SGD(0.1), delays, updates=updates, **SIZES)
    rates, told = zip(*steps, strict=True)
    assert rates == pytest.approx([0.1 * warm_up_and_decay(updates, done) for done in range(updates)])
    drawn = parse(str(delays)).draw(updates, seed=0).delays
    assert list(told) == drawn.tolist()
    assert found.updates == len(passes) == updates


def test_a_delay_is_that_of_the_simulator(tokens):
    """A constant delay in the loop is plain SGD with the gradients of three updates ago."""
    updates, lr, delay = 12, 0.3, 3
    found = train(gpt(), tokens, lg.SGD(lr), delay, updates=updates, scheduled=False, **SIZES)
    model, past = gpt(), []
    newest = [p.detach().clone() for p in model.parameters()]
    for t, (inputs, targets) in zip(range(updates), batches_of(tokens), strict=False):
        past.append(newest)
        for p, value in zip(model.parameters(), past[max(0, t - delay)], strict=True):
            p.data.copy_(value)
        model.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        newest = [value - lr * p.grad for value, p in zip(newest, model.parameters(), strict=True)]
    for p, value in zip(model.parameters(), newest, strict=True):
        p.data.copy_(value)
    assert found.train == pytest.approx(mean_loss(model, tokens.train.long(), CONTEXT, 20), abs=1e-5)


def test_accumulated_minibatches_are_one_large_one(tokens):
    rule, updates, many = lg.baselines.Muon(0.01), 10, 5
    found = train(gpt().double(), tokens, rule, 0, updates=updates, micro_batches=many, **SIZES)
    model = gpt().double()
    kinds = Blocks.of_module(model).labels
    optimizer = lg.optim.FromRule([{"params": list(model.parameters()), "kinds": kinds}], rule)
    scheduler = LambdaLR(optimizer, partial(warm_up_and_decay, updates))
    batches = batches_of(tokens)
    for _ in range(updates):
        parts = [next(batches) for _ in range(many)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
    assert found.held_out == pytest.approx(mean_loss(model, tokens.held_out.long(), CONTEXT, 20), abs=1e-6)


def test_a_pipeline_tells_the_rule_the_delay_of_every_stage(tokens, steps):
    delays = by_stage(gpt(), 8)
    assert set(delays.delays) == set(range(8))
    found = train(delays.model, tokens, lg.SteadyMuon(0.01), delays, updates=12, scheduled=False, **SIZES)
    told = [delay for _, delay in steps]
    assert told[0] == [0] * len(delays.delays)  # there are no older parameters yet
    assert told[-1] == list(delays.delays)
    assert len(told) == 12
    assert math.isfinite(found.held_out)


def test_losses_in_the_course_of_a_run_are_those_of_the_output_and_do_not_change_it(tokens):
    """A constant learning rate: the losses after a third of the updates are those of a run of a third."""
    delays = by_stage(gpt(), 4)
    options = {"scheduled": False, **SIZES}
    parts = [*large.train(delays.model, tokens, lg.SteadyMuon(0.01), delays, updates=30, parts=3, **options)]
    assert [part.updates for part in parts] == [10, 20, 30]
    for part in parts:
        delays = by_stage(gpt(), 4)
        assert part == train(delays.model, tokens, lg.SteadyMuon(0.01), delays, updates=part.updates, **options)


def test_what_is_judged_is_the_output(tokens):
    """SteadyAdam outputs an average, which the loop's own parameters are not."""
    model = gpt()
    found = train(model, tokens, lg.SteadyAdam(0.03), 0, updates=20, scheduled=False, **SIZES)
    assert abs(found.train - mean_loss(model, tokens.train.long(), CONTEXT, 20)) > 1e-4


def test_a_run_that_diverges_has_an_infinite_loss_and_ends_early(tokens):
    model, passes = gpt(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    found = train(model, tokens, lg.SGD(1e30), 0, updates=500, scheduled=False, **SIZES)
    assert found == (500, math.inf, math.inf, math.inf)
    assert len(passes) < 100
    parts = [*large.train(gpt(), tokens, lg.SGD(1e30), 0, updates=500, parts=5, scheduled=False, **SIZES)]
    assert parts == [(updates, math.inf, math.inf, math.inf) for updates in (100, 200, 300, 400, 500)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("delay", ["0", "3", "lognormal", "pipeline"])
def test_on_a_gpu_it_is_the_same_up_to_bfloat16(tokens, delay):
    def losses(device):
        delays = SMALL.delay_model(delay)
        model = delays.model if delay == "pipeline" else SMALL.gpt()
        return train(model, tokens, lg.SteadyMuon(0.01), delays, updates=40, scheduled=False, device=device, **SIZES)

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=0.05)


# ---- The study


RULES = ("steady-adam", "adamw", "synchronous-muon")
SMALL = LargeSetting("gpt-34m", 20, 2, delays=("0", "3", "pipeline"), tuned_at=("0",), rules=RULES, evaluate=8,
                     context=CONTEXT, layers=2, width=16, vocabulary=LETTERS)  # fmt: skip
PLAN = Plan((SMALL,), CANDIDATES, seeds=3)


@pytest.fixture
def stored(tokens, tmp_path, monkeypatch):
    """The made-up tokens where the study finds them; returns a function that puts other ones there."""

    def store(train, held_out, folder="data"):
        monkeypatch.setenv("LATEGRAD_DATA", str(tmp_path / folder))
        (tmp_path / folder).mkdir()
        save_file({"train": train, "held_out": held_out}, tmp_path / folder / tokens_file().name)

    store(tokens.train, tokens.held_out)
    return store


def test_the_section_has_tables_of_runs_in_the_loop_which_are_kept(stored, tmp_path, tokens):
    said = []
    space = Workspace(tmp_path / "out", say=said.append)
    section = Deep().section_of(PLAN, space)
    frozen = section.tables[f"{SMALL.title}, frozen"]
    assert frozen[0] == {"rule": "rounds", "0": "20", "3": "5", "pipeline": "2", "spread": "", "lr": ""}
    assert frozen[1]["rule"] == "synchronous Muon"
    assert all(row[delay] for row in frozen for delay in SMALL.delays)
    assert all((row["drift"] > 0) == (row["delay"] != "0") for row in section.rows if row["rule"] == "adamw")
    # three learning rates at delay 0 and the frozen one at the others; anchors have four in each of three rounds
    assert len(said) == 2 * (3 + 2) + 3 * 4
    assert "deep: gpt-34m, adamw, delay 3, lr" in " ".join(said)
    assert all("updates in" in line and "a second; held-out loss" in line for line in said)
    for row in [row for row in section.rows if row["rule"] == "adamw" and row["delay"] != "pipeline"][::3]:
        alone = train(SMALL.gpt(), tokens, lg.baselines.AdamW(row["lr"]), int(row["delay"]), updates=20, batch=2,
                      context=CONTEXT, evaluate=8)  # fmt: skip
        assert (row["loss"], row["test_loss"]) == pytest.approx((alone.train, alone.held_out), abs=1e-6)
        assert row["seed"] == 0
    page = write_report([section], tmp_path / "out", {}).read_text(encoding="utf-8")
    assert page.count("<img") == 2  # losses, and the drift of all runs
    assert Deep().section_of(PLAN, space).tables == section.tables
    kept = sorted((tmp_path / "out" / "traces").glob("*"))
    for path in kept:  # of an interrupted grid the finished runs are there, the grid is not
        if "-run-" not in path.name:
            path.unlink()
    assert Deep().section_of(PLAN, space).tables == section.tables
    assert len(said) == 22  # nothing was run again
    stored(tokens.train.flip(0), tokens.held_out, "other")
    Deep().section_of(PLAN.limited(["gpt-34m"], ["adamw"]), space)
    assert len(said) == 22 + 5  # another text, other runs


def test_an_anchor_has_as_many_gradients_in_fewer_rounds(stored, tokens, tmp_path):
    (anchor,) = [one for one in SMALL.candidates if one.rule == "synchronous-muon"]
    (found,) = SMALL.train(anchor, "3", 0.01, 0, "cpu")
    alone = train(SMALL.gpt(), tokens, lg.baselines.Muon(0.01), 0, updates=5, micro_batches=4, batch=2,
                  context=CONTEXT, evaluate=8)  # fmt: skip
    assert found == alone
    assert SMALL.rounds("pipeline") == 20 // 8


def test_the_large_models_are_in_the_study_by_name_with_34_million_parameters():
    for scale in ("paper", "full"):
        long = PLANS[scale].limited(["gpt-34m", "gpt-34m-long"], []).settings
        assert [setting.updates for setting in long] == [2_000, 6_000]
        assert not any(isinstance(setting, LargeSetting) for setting in PLANS[scale].limited([], []).settings)
    setting = long[0]
    assert (setting.layers, setting.width, setting.context, setting.batch) == (8, 512, 256, 16)
    assert sum(p.numel() for p in setting.gpt().parameters()) == 33_702_912
    for candidate in setting.candidates:
        assert len(candidate.lrs) == (4 if candidate.synchronous else 3)
        assert candidate.lrs[2] / candidate.lrs[0] == pytest.approx(10, rel=0.01)


# ---- Pipelines of more and more stages


def test_the_slowdown_is_the_ratio_of_updates_at_equal_loss():
    def power(updates):
        return 5 * updates**-0.2

    undelayed = {t: power(t) for t in (250, 500, 1000)}
    for ratio in (1.0, 1.3, 3.9):  # late runs that are as good as undelayed ones of a fraction of the updates
        assert slowdown(undelayed, power(1000 / ratio)) == pytest.approx(ratio)
    assert slowdown(undelayed, power(240)) == slowdown(undelayed, math.inf) == math.inf
    assert slowdown(undelayed, power(1100)) == 1.0  # by how much it is faster is not known
    expected = 1000 / (500 * 2 ** (math.log(3 / 2.5) / math.log(3 / 2)))
    assert slowdown({250: 3.0, 500: 3.2, 1000: 2.0}, 2.5) == pytest.approx(expected)


def test_a_pipeline_has_the_same_number_of_blocks_in_every_stage():
    setting = PipelineSetting("gpt-63m", 10, 2, width=16, heads=2, context=CONTEXT, vocabulary=LETTERS)
    assert setting.delay_model("0") == 0
    for stages in (8, 16, 32):
        profile = setting.delay_model(f"pipeline-{stages}")
        told = dict(zip([block.name for block in profile.blocks.parts], profile.delays, strict=True))
        assert setting.mean_delay(f"pipeline-{stages}") == profile.largest == stages - 1
        for i in range(32):
            assert told[f"blocks.{i}.query.weight"] == told[f"blocks.{i}.hidden_writes.weight"]
            assert told[f"blocks.{i}.query.weight"] == stages - 1 - i // (32 // stages)
        assert told["characters.weight"] == told["positions.weight"] == stages - 1
        assert told["norm.weight"] == told["scores.weight"] == 0


def test_every_rule_is_compared_with_itself_in_one_stage(stored, tmp_path, tokens):
    said = []
    rules = ("muon", "muon-prediction", "adamw")
    setting = PipelineSetting("gpt-2m", 20, 2, delays=("0", "pipeline-2", "pipeline-4"), evaluate=8, layers=4, width=16,
                              heads=2, context=CONTEXT, vocabulary=LETTERS, parts=2,
                              candidates=SMALL_PIPELINE_CANDIDATES, rules=rules)  # fmt: skip
    plan, space = Plan((setting,), CANDIDATES, seeds=1), Workspace(tmp_path / "out", say=said.append)
    section = Deep().section_of(plan, space)
    # Two rules with three learning rates, three shorter runs, and two pipelines; of the third, which is Muon without
    # delay, pipelines alone.
    assert len(said) == 2 * (3 + 3 + 2) + 2
    ratios = {row["rule"]: row for row in section.tables[f"{setting.title}, slowdown"][1:]}
    assert all(row["0"] == "1.00" and float(row["pipeline-4"]) >= 1 for row in ratios.values())
    rows = [row for row in section.rows if row["rule"] == "muon-prediction" and row["delay"] == "pipeline-4"]
    assert [row["step"] for row in rows] == [10, 20]
    late = setting.delay_model("pipeline-4")
    rule = lg.baselines.Muon(rows[0]["lr"], prediction=True)
    alone = train(late.model, tokens, rule, late, updates=20, batch=2, context=CONTEXT, evaluate=8)
    assert rows[-1]["test_loss"] == pytest.approx(alone.held_out, abs=1e-6)
    assert Deep().section_of(plan, space).tables == section.tables
    assert len(said) == 18  # nothing was run again
    assert write_report([section], tmp_path / "out", {}).read_text(encoding="utf-8").count("data:image/svg") == 2


def test_the_pipelines_of_the_yardstick_have_63_million_parameters():
    setting, small = PLANS["paper"].limited(["gpt-63m", "gpt-2m"], []).settings
    assert sum(p.numel() for p in setting.gpt().parameters()) == 63_161_088
    assert sum(p.numel() for p in small.gpt().parameters()) == 1_596_032


def test_on_a_gpu_large_models_are_trained_in_processes(tmp_path):
    jobs = Deep().jobs_of(PLANS["paper"].limited(["gpt", "gpt-34m"], []), Workspace(tmp_path, "cuda"))
    assert all(job.lane == ("gpu" if "gpt-34m" in job.label else "streams") for job in jobs)
    assert all(job.lane == "processes" for job in Deep().jobs_of(PLAN, Workspace(tmp_path)))
