"""Which parameters are matrices: what modules and shapes say, what users say, and what is refused."""

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.parameters import flat, parameters, saved_and_loaded, set_grads
from lategrad.optim import FromRule, SteadyMuon
from lategrad.problems import ModuleProblem, load
from lategrad.rules import Block, Blocks
from lategrad.rules._orthogonalize import matrix_step, orthogonalise


class Everything(nn.Module):
    """One of each layer of torch that has parameters of two dimensions and more, and two of the user's own."""

    def __init__(self, own=True):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.grouped = nn.Conv1d(4, 6, 3, groups=2)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.back = nn.ConvTranspose2d(4, 2, 3, bias=False)
        self.norm = nn.LayerNorm([2, 4])
        self.recurrent = nn.LSTM(1, 4, proj_size=2, bias=False)
        self.attention = nn.MultiheadAttention(4, 2, bias=False, add_bias_kv=True)
        self.score = nn.Linear(4, 1, bias=False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        if own:
            self.position = nn.Parameter(torch.zeros(1, 5, 4))
            self.experts = nn.Parameter(torch.zeros(3, 2, 4))


def labels(module, kinds=None):
    return {block.name: block.label for block in Blocks.of_module(module, kinds).parts}


def test_the_modules_of_torch_say_what_their_tensors_are():
    assert labels(Everything()) == {
        "position": "undecided", "experts": "undecided",
        "embed.weight": "embedding",  # and the head's, which is the same
        "grouped.weight": "2 matrices", "grouped.bias": "other", "depthwise.weight": "4 matrices",
        "back.weight": "matrix", "norm.weight": "other", "norm.bias": "other",
        "recurrent.weight_ih_l0": "matrix", "recurrent.weight_hh_l0": "matrix", "recurrent.weight_hr_l0": "matrix",
        "attention.in_proj_weight": "matrix", "attention.bias_k": "other", "attention.bias_v": "other",
        "attention.out_proj.weight": "matrix", "score.weight": "matrix",
    }  # fmt: skip
    shapes = {
        block.name: block.matrix_shape for block in Blocks.of_module(Everything()).parts if block.kind == "matrix"
    }
    assert shapes["grouped.weight"] == (2, 3, 6)
    assert shapes["depthwise.weight"] == (4, 1, 9)
    assert shapes["back.weight"] == (4, 18)
    assert shapes["score.weight"] == (1, 4)


def test_users_say_it_by_name_or_module_and_the_first_that_matches_counts():
    model = Everything()
    kinds = {model.attention: "other", "pos*": "embedding", "experts": "3 matrices", "head.weight": "matrix",
             "*.in_proj_weight": "matrix"}  # fmt: skip
    told = labels(model, kinds)
    assert told["position"] == "embedding"
    assert told["experts"] == "3 matrices"
    assert told["embed.weight"] == "matrix"  # by the other of its names
    assert {told[name] for name in told if name.startswith("attention.")} == {"other"}
    assert told["score.weight"] == "matrix"


def test_a_layer_in_two_places_can_be_named_by_either():
    model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False)})
    model["again"] = model["first"]
    assert labels(model, {"again.weight": "3 matrices"}) == {"first.weight": "3 matrices"}


REFUSED = {
    "a pattern that matches nothing": (
        {"heed.*": "other"},
        "each pattern of kinds must be one that matches .*got 'heed",
    ),
    "a module of another model": ({nn.Linear(2, 2): "other"}, "one that matches a parameter: position, experts"),
    "not a pattern": ({3: "other"}, "each pattern of kinds must be a text or a module, got 3"),
    "not a kind": (
        {"experts": "tensor"},
        "kind of 'experts' must be 'matrix', 'tokens', 'embedding', 'other' or, for .*'tensor'",
    ),
    "a vector": ({"norm.*": "other", "grouped.*": "matrix"}, "kind of 'grouped.bias' must be one that its shape"),
    "not divisible": ({"embed.*": "4 matrices"}, r"'embed.weight' must be one that its shape \(9, 4\) .*'4 matrices'"),
    "empty": ({"experts": ""}, "kind of 'experts' must be 'matrix', .* got ''"),
    "nothing": ({"experts": None}, r"kinds\['experts'\] must be given, got None"),
    "none": ({"experts": "0 matrices"}, "'experts' must be one that its shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_slip_of_the_user_is_refused(case):
    kinds, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Blocks.of_module(Everything(), kinds)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), "other"), ((5,), "other"), ((3, 4), "matrix"), ((1, 4), "undecided"), ((4, 1), "undecided"),
     ((2, 3, 4), "undecided"), ((6, 3, 2, 2), "matrix"), ((1, 3, 2, 2), "undecided"), ((6, 1, 2, 2), "undecided"),
     ((1000, 166), "other"), ((999, 3), "matrix"), ((1000, 167), "matrix"), ((1000, 1), "undecided")],
)  # fmt: skip
def test_shapes_alone_decide_where_they_leave_little_doubt(shape, kind):
    assert Blocks.of_tensors([torch.zeros(shape)]).parts[0].kind == kind


def test_a_last_layer_has_a_row_for_each_token_unless_the_user_says_otherwise():
    model = nn.ModuleDict({"wide": nn.Linear(200, 1000), "head": nn.Linear(100, 1000), "lstm": nn.LSTM(4, 250)})
    found = {"wide.weight": "matrix", "head.weight": "tokens", "lstm.weight_ih_l0": "matrix"}
    assert {name: labels(model)[name] for name in found} == found
    assert labels(model, {"head.weight": "matrix"})["head.weight"] == "matrix"


def test_rows_of_tokens_are_orthogonalised_by_our_rule_and_not_by_muon():
    gradient = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    for rule in (lg.baselines.Muon(0.1), lg.baselines.RingmasterMuon(0.1), lg.SteadyMuon(0.1)):
        points = {}
        for kind in ("tokens", "other", "matrix"):
            p = nn.Parameter(torch.zeros(1000, 10))
            p.grad = gradient.clone()
            FromRule([{"params": [p], "kinds": kind}], rule).step()
            points[kind] = p.detach()
        differs = {kind: not torch.allclose(points["tokens"], points[kind], rtol=0.1) for kind in ("other", "matrix")}
        assert differs == {"other": isinstance(rule, lg.SteadyMuon), "matrix": True}


def test_frequent_tokens_would_move_many_times_too_far_and_are_bounded():
    columns, rows = 10, 1000
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    frequency = 1 / torch.arange(1.0, rows + 1)[:, None]  # Zipf's law
    sizes = [matrix_step(g).square().mean(1).sqrt() for g in (gradient, frequency * gradient)]
    assert sizes[0].max() < 2 * 0.2  # rows that are alike move as Adam would move them
    assert sizes[1][:5].mean() > 5 * 0.2
    steps = [matrix_step(frequency * gradient, of_tokens) for of_tokens in (False, True)]
    assert steps[1].square().mean(1).sqrt().max() < 1.001 * 0.2
    torch.testing.assert_close(*map(nn.functional.normalize, steps))


def test_a_parameter_of_which_nothing_tells_is_refused_by_every_host_that_needs_to_know():
    message = (
        r"is it a matrix\? .* 'position' \(1, 5, 4\), 'experts' \(3, 2, 4\)\. Say it with kinds=, such as {'position"
    )
    with pytest.raises(ValueError, match=message):
        SteadyMuon(Everything())
    with pytest.raises(ValueError, match=r"'0' \(2, 3, 4\)"):
        SteadyMuon(parameters([(2, 3, 4), (3, 3)]))
    for muon in (lg.baselines.Muon(0.1), lg.SteadyMuon(0.1), lg.Scheduled(lg.SteadyMuon(0.1), warmup=2)):
        with pytest.raises(ValueError, match=r"'0' \(1, 4\)"):
            FromRule(parameters([(1, 4)]), muon)
    FromRule(parameters([(1, 4)]), lg.SGD(0.1)).in_place_steps(0)  # it takes no blocks
    blocks = Blocks.of_tensors(parameters([(1, 4)]))
    rule = lg.baselines.Muon(0.1, blocks=blocks)
    with pytest.raises(ValueError, match=r"'0' \(1, 4\)"):
        rule.update(rule.init(torch.zeros(4)), torch.ones(4), torch.tensor(0))


class Scored(nn.Module):
    """A linear layer on digits with a scale that is a single row."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(1, 64)), nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(self.scale * x)


def test_problems_take_the_same_kinds_for_simulations_and_training():
    data = load("digits")
    rule, delays = lg.SteadyMuon(0.01), lg.delays.Constant(1)
    with pytest.raises(ValueError, match=r"'scale' \(1, 64\)"):
        lg.simulate(ModuleProblem(Scored(), data), rule, delays, 3)
    told = ModuleProblem(Scored(), data, kinds={"scale": "other"})
    lg.simulate(told, rule, delays, 3)
    lg.train(told, rule, steps=3, workers=1, engine="threads")
    other = ModuleProblem(Scored(), data, kinds={"*": "other"})
    assert told.fingerprint() != other.fingerprint()  # a checkpoint of one is not continued with the other
    assert told.fingerprint() == ModuleProblem(Scored(), data, kinds={"scale": "other"}).fingerprint()


@pytest.mark.parametrize("make", [lg.SteadyMuon, lg.baselines.Muon, lg.baselines.RingmasterMuon])
@pytest.mark.parametrize(
    ("shape", "label", "pieces"),
    [((12, 5), "3 matrices", (4, 5)), ((3, 4, 5), "3 matrices", (4, 5)), ((2, 6, 5), "4 matrices", (3, 5))],
)
def test_several_matrices_in_a_tensor_are_trained_as_if_they_were_tensors(make, shape, label, pieces):
    together, apart = parameters([shape, (4,)]), parameters([shape, (4,)])
    split = [nn.Parameter(part.clone()) for part in apart[0].detach().view(-1, *pieces)]
    one = FromRule([{"params": together, "kinds": [label, "other"]}], make(0.1))
    many = FromRule([*split, apart[1]], make(0.1))
    for seed in range(3):
        grads = set_grads(together, seed).split([together[0].numel(), 4])
        for p, grad in zip([*split, apart[1]], [*grads[0].view(-1, *pieces), grads[1]], strict=True):
            p.grad = grad
        one.step()
        many.step()
    torch.testing.assert_close(flat(together), flat([*split, apart[1]]))


def test_each_head_is_orthogonalised():
    attention = nn.MultiheadAttention(8, 2, bias=False)
    start = attention.in_proj_weight.detach().clone()
    optimizer = SteadyMuon(attention, lr=1.0, kinds={"in_proj_weight": "6 matrices"})
    set_grads(optimizer.param_groups[0]["params"], 0)
    grad = attention.in_proj_weight.grad.view(6, 4, 8)
    optimizer.step()
    step = (start - attention.in_proj_weight.detach()).view(6, 4, 8)
    torch.testing.assert_close(step / step.norm(), orthogonalise(grad) / orthogonalise(grad).norm())


def test_named_parameters_and_groups_are_told_by_name_too():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    by_name = SteadyMuon(model.named_parameters(), kinds={"1.weight": "other"})
    assert by_name.param_groups[0]["kinds"] == ["matrix", "other", "other", "other"]
    groups = [{"params": list(model[0].named_parameters())},
              {"params": list(model[1].named_parameters()), "kinds": {"w*": "embedding"}}]  # fmt: skip
    assert [group["kinds"] for group in SteadyMuon(groups).param_groups] == [
        ["matrix", "other"],
        ["embedding", "other"],
    ]
    with pytest.raises(ValueError, match="for parameters without names: pass the module, or its named_parameters"):
        SteadyMuon(model.parameters(), kinds={"1.weight": "other"})
    with pytest.raises(ValueError, match="kinds must be a mapping where params is a module, got 'matrix'"):
        SteadyMuon(model, kinds="matrix")
    with pytest.raises(ValueError, match="kinds must be one kind, or 4, one for each parameter"):
        FromRule([{"params": list(model.parameters()), "kinds": ["matrix"]}], lg.baselines.Muon(0.1))


def test_it_shows_how_it_takes_the_parameters():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Conv1d(4, 6, 3, groups=2), nn.Linear(4, 4, bias=False))
    optimizer = SteadyMuon(model, lr=0.02, kinds={"2.weight": "2 matrices"})
    assert optimizer.parameter_table().splitlines() == [
        "name      shape      taken as",
        "0.weight  7 x 4      embedding",
        "1.weight  6 x 2 x 3  2 matrices of 3 x 6",
        "1.bias    6          other",
        "2.weight  4 x 4      2 matrices of 2 x 4",
    ]
    assert repr(optimizer) == (
        "SteadyMuon(lr=0.02, weight_decay=0.0, Blocks(2 matrix, 1 embedding, 1 other; 86 entries))"
    )
    optimizer.add_param_group({"params": parameters([(2, 2), ()]), "kinds": "other"})
    assert optimizer.parameter_table().splitlines()[-2:] == [
        "group 1: 0  2 x 2   other",
        "group 1: 1  scalar  other",
    ]
    assert repr(Blocks.of_module(Everything())).startswith("Blocks(9 matrix, 1 embedding, 5 other, 2 undecided;")


def test_kinds_are_part_of_a_checkpoint_also_of_one_without_names():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2))

    def train(module, optimizer, seeds):
        for seed in seeds:
            set_grads(list(module.parameters()), seed)
            optimizer.step()

    straight, first, second = model(), model(), model()
    train(straight, SteadyMuon(straight, kinds={"0.*": "3 matrices"}), range(4))
    optimizer = SteadyMuon(first, kinds={"0.*": "3 matrices"})
    train(first, optimizer, range(2))
    saved = saved_and_loaded(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    resumed = SteadyMuon(second.parameters())
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["kinds"] == ["3 matrices", "matrix", "other"]
    train(second, resumed, range(2, 4))
    assert torch.equal(flat(second.parameters()), flat(straight.parameters()))


def test_a_block_is_valid():
    with pytest.raises(ValueError, match="kind of 'w' must be 'matrix', 'tokens', 'embedding'"):
        Block("w", (2, 2), None)
    assert Block("w", (1, 3, 4), "1 matrices").matrix_shape == (1, 3, 4)
    assert Block("w", (1, 3, 4), "matrix").matrix_shape == (1, 12)
    assert Block("w", (0, 4), "matrix").size == 0
