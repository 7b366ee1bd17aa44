"""Updates in C: the numbers of the torch path, whatever runs are beside a run, and nothing that they cannot do."""

import gc

import pytest
import torch

import lategrad as lg
from lategrad import delays as d
from lategrad.problems import LeastSquares, SmoothedSVM, SoftmaxRegression, load
from lategrad.simulator import Simulation
from lategrad.support.threads import torch_threads

DIGITS = load("digits")
SWEEP = torch.tensor([[0.1], [0.5], [2.0]])
MODELS = [0, d.Uniform(0, 9), 40]


def softmax(**options):
    return SoftmaxRegression(DIGITS, l2=0.1, **{"batch": 6} | options)


def anytime(lr=SWEEP):
    return lg.Anytime(lg.OGD(lr, lg.Ball(3.0)))


def simulate(rule, models=MODELS, seed=(0, 4), **options):
    trace = lg.simulate(softmax(), rule, models, 300, seed=list(seed), record_every=300, compile=True, **options)
    assert trace.config["backend"] == "loops"
    return trace


def test_a_run_is_the_same_bit_for_bit_whatever_runs_are_beside_it():
    together = simulate(anytime())
    for j, k in ((0, 2), (1, 0), (2, 1)):
        alone = simulate(anytime(SWEEP[k : k + 1]), MODELS[j : j + 1], seed=(4,))
        assert torch.equal(together.output[1, j, k], alone.output[0, 0, 0])


def test_threads_and_the_length_of_chunks_change_nothing():
    once = simulate(anytime())
    with torch_threads(2):
        assert torch.equal(simulate(anytime()).output, once.output)
    often = lg.simulate(softmax(), anytime(), MODELS, 300, seed=[0, 4], record_every=7, compile=True)
    assert torch.equal(often.output, once.output)


def test_runs_with_samples_of_their_own():
    apart = simulate(anytime(), share_samples=False)
    eager = lg.simulate(softmax(), anytime(), MODELS, 300, seed=[0, 4], share_samples=False, compile=False)
    torch.testing.assert_close(apart.output, eager.output, rtol=1e-4, atol=1e-5)


NUMBERS = DIGITS._replace(y_train=DIGITS.y_train.double(), y_test=DIGITS.y_test.double(), classes=None)
WEIGHTS = torch.linspace(0, 2, 2 * len(DIGITS.x_train))[::2]  # with gaps in its memory


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        (LeastSquares, NUMBERS, {"batch": 1, "weights": WEIGHTS}),
        (SmoothedSVM, DIGITS, {"batch": 9, "sampling": "epochs"}),
    ],
)
def test_the_gradients_of_linear_models_are_those_of_torch(model, data, options):
    problem = model(data, dtype=torch.float64, **options)
    rule = lg.SGD(torch.tensor([[0.001], [0.003]], dtype=torch.float64), average="uniform")
    eager, loops = (lg.simulate(problem, rule, [0, 7], 200, compile=compile) for compile in (False, True))
    assert (eager.config["backend"], loops.config["backend"]) == ("eager", "loops")
    torch.testing.assert_close(loops.output, eager.output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loops.query, eager.query, rtol=1e-10, atol=1e-12)


class Doubled(SoftmaxRegression):
    def gradient(self, x, sample):
        return 2 * super().gradient(x, sample)


class Wrapped:
    def __init__(self, problem):
        self.problem = problem

    def __getattr__(self, name):
        return getattr(self.problem, name)

    def gradient(self, x, sample):
        return 2 * self.problem.gradient(x, sample)


OTHERS = {
    "a subclass with its own gradient": {"problem": Doubled(DIGITS, batch=6)},
    "a wrapped problem": {"problem": Wrapped(softmax())},
    "a large batch": {"problem": softmax(batch=32)},
    "a problem without C": {"problem": lg.problems.Quadratic()},
    "a rule with tickets": {"rule": lg.parse_rule("dc-asgd:lr=0.1")},
    "a rule that sorts": {"rule": lg.SGD(0.1, lg.Simplex())},
    "clipped gradients": {"clip": 1.0},
    "refused gradients": {"max_norm_ratio": 10.0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_form_in_c_is_left_to_torch(name):
    case = {"problem": softmax(), "rule": lg.SGD(0.1), "backend": "compile"} | OTHERS[name]
    options = {key: case[key] for key in ("clip", "max_norm_ratio") if key in case}
    arrivals = [[d.Constant(3).draw(10, 0)]]
    simulation = Simulation(case["problem"], case["rule"], arrivals, (0,), True, True, **options)
    assert simulation.backend == case["backend"]


def test_a_simulation_in_c_frees_its_memory_at_once():
    gc.collect()
    gc.disable()
    try:
        simulate(anytime())
        left = [o for o in gc.get_objects() if type(o) is Simulation]
    finally:
        gc.enable()
    assert left == []
