"""Rules, learners, constraint sets and delays as texts of one grammar."""

import dataclasses
import pickle
import textwrap
from typing import Literal

import pytest
import torch

import lategrad as lg
from lategrad.registry import LEARNERS, RULES, build_rule, parse_rule, read_rule
from lategrad.support.options import options_of, parse_options
from lategrad.trace import describe


def numbers(spec):
    """A value for every option that has none."""
    return ",".join(f"{name}=0.5" for name, option in spec.entry.options.items() if option.required)


@pytest.mark.parametrize("name", RULES)
def test_every_option_of_every_rule_can_be_written(name):
    needed = numbers(read_rule(name))
    plain = parse_rule(f"{name}:{needed}" if needed else name)
    defaults = ",".join(f"{key}={option!s}".replace(f"{key}={key}=", f"{key}=") for key, option in
                        RULES[name].options.items() if not option.required)  # fmt: skip
    written = parse_rule(f"{name}:" + ",".join(filter(None, [needed, defaults])))
    assert repr(written) == repr(plain)


@pytest.mark.parametrize("name", [*RULES, *LEARNERS])
def test_every_number_and_word_of_the_class_is_an_option(name):
    entry = RULES.get(name) or LEARNERS[name]
    built = entry.make(**{entry.parameter: 0.5})
    parts = [built, built.learner] if name.startswith(("anytime", "optimistic-anytime")) else [built]
    fields = {field.name for part in parts for field in dataclasses.fields(part)}
    assert set(entry.options) == fields - {"domain", "learner", "blocks", "delay_blocks", "weights"}


def test_options_reach_the_rule_and_the_learner_inside_it():
    rule = parse_rule("anytime-sgd:lr=2,schedule=constant,power=3,interpolation=0.5", domain="l1:4")
    assert (rule.learner.lr, rule.learner.schedule, rule.power, rule.interpolation) == (2.0, "constant", 3, 0.5)
    assert rule.domain.radius == 4.0
    assert parse_rule("steady-coordinate").per_coordinate
    assert not parse_rule("steady-coordinate:per_coordinate=false").per_coordinate
    assert parse_rule("delay-adaptive:lr=1,workers=8").workers == 8
    assert parse_rule("delay-adaptive:lr=1,workers=none").workers is None
    assert parse_rule("sgd:lr=1,domain=box:-1,2").domain.high == 2.0


def test_several_values_are_a_sweep_with_an_axis_for_each_option():
    rule = parse_rule("steady:c=10|20|30,lr=0.1|1")
    assert rule.c.shape == (3, 1, 1)
    assert rule.lr.shape == (2, 1)
    assert rule.init(torch.zeros(5)).x.shape == (3, 2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stedy", "unknown rule 'stedy'; did you mean 'steady'\\?; valid: anytime-sgd"),
        ("steady:lrr=1", "rule 'steady' has no option 'lrr'; did you mean 'lr'\\?; its options: lr=1, c=30, per"),
        ("steady:lr=fast", "lr of rule 'steady' must be a number, got 'fast'"),
        ("steady:per_coordinate=perhaps", "per_coordinate of rule 'steady' must be true or false, got 'perhaps'"),
        ("steady:per_coordinate=true|false", "per_coordinate of rule 'steady' takes one value"),
        ("sgd:lr=0.1,lr=1", "lr of rule 'sgd' is given twice"),
        (
            "sgd:0.1,none,0,ball:1,3",
            "rule 'sgd' takes at most 4 values, got '0.1,none,0,ball:1,3'; its options: lr",
        ),
        ("sgd", "rule 'sgd' needs lr: write sgd:lr=VALUE"),
        ("strongly-convex", "needs strong_convexity: write strongly-convex:strong_convexity=VALUE"),
        ("sgd:lr=-1", "rule 'sgd': lr must be a finite number >= 0, got -1.0"),
        ("sgd:lr=1|-1|2", r"rule 'sgd': lr must be a finite number >= 0, got \[1, -1, 2\]"),
        ("sgd:lr=1,average=mean", "average of rule 'sgd' must be one of none, uniform, linear, got 'mean'"),
        ("sgd:lr=1,domain=boll:1", "unknown constraint set 'boll'; did you mean 'ball'"),
        ("sgd:lr=1,domain=ball:-1", "constraint set 'ball': radius must be a finite number >= 0, got -1.0"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse_rule(text)


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (lambda: parse_rule("sgd:0.1,linear"), lambda: parse_rule("sgd:lr=0.1,average=linear")),
        (lambda: lg.parse_set("box:-1,2"), lambda: lg.parse_set("box:low=-1,high=2")),
        (lambda: lg.delays.parse("lognormal:7,0.4"), lambda: lg.delays.parse("lognormal:mu=7,sigma=0.4")),
        (lambda: lg.delays.parse("cluster:3,constant"), lambda: lg.delays.parse("cluster:speed=constant,workers=3")),
    ],
    ids=["rule", "constraint set", "delay", "cluster"],
)
def test_values_are_written_in_order_or_by_name(positional, named):
    assert describe(positional()) == describe(named())


@pytest.mark.parametrize(
    ("parse", "kind", "wrong", "meant"),
    [(parse_rule, "rule", "stedy:1", "steady"), (lg.parse_set, "constraint set", "bal:1", "ball"),
     (lg.delays.parse, "delay", "unifrom:0,1", "uniform")],
)  # fmt: skip
def test_unknown_names_are_told_the_same_way(parse, kind, wrong, meant):
    name = wrong.partition(":")[0]
    with pytest.raises(ValueError, match=f"unknown {kind} '{name}'; did you mean '{meant}'\\?; valid: "):
        parse(wrong)


def test_a_set_is_given_once():
    with pytest.raises(ValueError, match="domain must be None: rule 'sgd' has its own"):
        parse_rule("sgd:lr=1,domain=ball:1", "ball:2")


def test_options_follow_annotations_or_else_defaults():
    def make(count: int, kind: Literal["fast", "slow"], label: str = "a", rate=0.5, anything=None, *rest, **more): ...

    options = options_of(make)
    assert list(options) == ["count", "kind", "label", "rate", "anything"]
    given = parse_options("count=3,kind=slow,label=x,rate=2,anything=7", options, "make")
    assert given == {"count": (3,), "kind": ("slow",), "label": ("x",), "rate": (2.0,), "anything": (7,)}
    with pytest.raises(ValueError, match="count of make must be an integer, got '1.5'"):
        parse_options("count=1.5", options, "make")
    with pytest.raises(ValueError, match="kind of make must be one of fast, slow, got 'idle'"):
        parse_options("kind=idle", options, "make")


OWN_RULE = """
    from dataclasses import dataclass

    import torch
    import lategrad as lg
    from lategrad.rules import first_query


    @dataclass(frozen=True, eq=False)
    class Halving:
        "Steps that halve every so many updates."

        lr: float | torch.Tensor
        every: int = 100
        domain: object = lg.WholeSpace()

        def init(self, x0):
            x = first_query(self, x0)
            return x, torch.zeros(*x.shape[:-1], 1, dtype=torch.float64)

        def query(self, state):
            return state[0]

        output = query

        def update(self, state, grad, delay):
            x, t = state
            lr = self.lr * 0.5 ** torch.floor(t / self.every)
            return self.domain.project(x - (lr * grad).to(x.dtype)), t + 1


    class Cube(lg.Box):
        def __init__(self, side: float):
            super().__init__(-side / 2, side / 2)


    class Alternating(lg.delays.Cyclic):
        def __init__(self, high: int = 5):
            super().__init__((0, high))


    def without_domain(lr: float):
        return Halving(lr)


    NOT_CALLABLE = 3
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    path = tmp_path / "my_own_rules.py"
    path.write_text(textwrap.dedent(OWN_RULE))
    yield path
    __import__("sys").modules.pop("my_own_rules", None)


def test_a_rule_of_ones_own_from_a_file_or_a_module(own_file, monkeypatch):
    from lategrad.checks import check_rule

    rule = parse_rule(f"{own_file}:Halving:lr=0.5,every=10", "ball:2")
    assert (rule.lr, rule.every, rule.domain.radius) == (0.5, 10, 2.0)
    check_rule(rule, compile=False)
    monkeypatch.chdir(own_file.parent)
    assert parse_rule("my_own_rules:Halving:lr=1|2").lr.shape == (2, 1)
    with pytest.raises(ValueError, match="has no 'Halvin'; did you mean 'Halving'"):
        parse_rule(f"{own_file}:Halvin:lr=1")
    with pytest.raises(ValueError, match="rule must be a class, or a function"):
        parse_rule(f"{own_file}:NOT_CALLABLE")
    with pytest.raises(ValueError, match="has no option 'lrs'; did you mean 'lr'"):
        parse_rule(f"{own_file}:Halving:lrs=1")
    with pytest.raises(ValueError, match="domain must be None: rule .* takes no domain"):
        parse_rule(f"{own_file}:without_domain:lr=1", "ball:1")
    with pytest.raises(FileNotFoundError, match="there is no file 'nowhere.py'"):
        parse_rule("nowhere.py:Rule")
    with pytest.raises(ValueError, match="rule must be FILE.py:NAME, with a class of that file, .* got 'nowhere.py'"):
        parse_rule("nowhere.py")


def test_texts_of_constraint_sets_and_delays_load_no_code(tmp_path):
    """A run's folder keeps them, and may be a stranger's."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w').close()\nclass K: pass\n")
    text = f"{tmp_path / 'evil.py'}:K"
    with pytest.raises(ValueError, match=r"unknown constraint set '.*evil.py'; valid: whole, ball"):
        parse_rule(f"sgd:lr=1,domain={text}")
    with pytest.raises(ValueError, match=r"unknown constraint set '.*evil.py'"):
        lg.SGD(1.0, domain=text)
    for delays in (text, f"queue:{text}", f"regimes:0.5*10;{text}"):
        with pytest.raises(ValueError, match=r"unknown delay '.*evil.py'; valid: constant:500"):
            lg.delays.parse(delays)
    with pytest.raises(ValueError, match="unknown delay"):
        lg.serve.Settings(steps=1, slow=text)
    assert not (tmp_path / "was here").exists()


def test_a_rule_without_a_domain_says_so(own_file):
    with pytest.raises(ValueError, match="domain must be None: rule .* takes no domain"):
        parse_rule(f"{own_file}:without_domain:lr=1,domain=ball:1")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_its_set_as_a_text(name):
    entry = RULES[name]
    by_text, by_set = entry.make(domain="ball:2", **{entry.parameter: 0.1}), build_rule(name, 0.1, lg.Ball(2.0))
    assert type(by_text) is type(by_set)
    assert isinstance(by_text.domain, lg.Ball)
    assert describe(by_text) == describe(by_set)
    copied = pickle.loads(pickle.dumps(by_text))
    assert describe(copied) == describe(by_set)


def test_learners_take_their_set_as_a_text_and_say_what_is_wrong_with_one():
    assert lg.Anytime(lg.OGD(1.0, domain="box:-1,1")).domain.project(torch.tensor([3.0])) == 1
    assert lg.SGD(lr=0.1, domain=None).domain.diameter == float("inf")
    assert lg.SGD(lr=0.1).domain.diameter == float("inf")
    with pytest.raises(ValueError, match="unknown constraint set 'bal'; did you mean 'ball'?"):
        lg.Steady(lr=1.0, domain="bal:5")


def test_a_set_from_a_text_is_compiled_like_any_other():
    problem = lg.problems.Quadratic()
    by_text, by_set = (
        lg.simulate(problem, lg.Steady(lr=1.0, domain=domain), 3, 50, compile=True).output
        for domain in ("ball:0.1", lg.Ball(0.1))
    )
    assert torch.equal(by_text, by_set)
    assert by_text.norm() <= 0.1 + 1e-9
