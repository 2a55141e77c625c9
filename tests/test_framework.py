"""What the databases do not reach: custom functions, checkpoints, checks, graphs, distributions,
initial values, samplers and loaders, and the errors that say what to do."""
import math
import threading

import numpy as np
import pytest

import minidist as md
import minidist.nn as nn
from minidist.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from oracle import check, close, make, normal, torch

F = nn.functional


# -- functions of one's own ------------------------------------------------------------------------


def cube(m):
    class Cube(m.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            result = x**3 * factor
            ctx.save_for_backward(x, result)
            ctx.factor = factor
            return result

        @staticmethod
        def backward(ctx, g):
            x, result = ctx.saved_tensors
            assert ctx.needs_input_grad[0]
            return 3 * g * x**2 * ctx.factor, None

    return Cube.apply


def two_results(m):
    class MulAdd(m.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            sign = m.sign(x)
            ctx.mark_non_differentiable(sign)
            return x * y, x + y, sign

        @staticmethod
        def backward(ctx, g, h, _=None):
            x, y = ctx.saved_tensors
            return g * y + h, g * x + h

    return MulAdd.apply


def test_custom_functions():
    check(lambda m, x: cube(m)(x, 2.0), (3, 4))
    check(lambda m, x, y: two_results(m)(x, y)[:2], (3, 4), (3, 4))
    x = md.ones(2, requires_grad=True)
    assert not two_results(md)(x, x)[2].requires_grad
    with md.no_grad():
        assert not cube(md)(x, 2.0).requires_grad
    assert md.autograd.gradgradcheck(lambda x: cube(md)(x, 2.0),
                                     md.randn(3, dtype=md.float64, requires_grad=True))


def test_custom_functions_refuse():
    x = md.ones(2, requires_grad=True)
    y = x * 1
    out = cube(md)(y, 1.0)
    y.add_(1)
    with pytest.raises(RuntimeError, match="Cube saved a tensor.*changed in place.*add_"):
        out.sum().backward()

    class Short(md.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(RuntimeError, match="Short.backward returned 1 gradients for 2 inputs"):
        Short.apply(x, x).sum().backward()


def test_checkpoint():
    layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 2))
    x = md.randn(4, 3, requires_grad=True)
    found = []
    for run in (layer, lambda x: md.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        md.manual_seed(3)
        layer.zero_grad()
        x.grad = None
        run(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found):
        close(a, b)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        md.autograd.grad(md.utils.checkpoint.checkpoint(md.sin, x).sum(), x, create_graph=True)


# -- derivatives as matrices, and checks -----------------------------------------------------------


def test_jacobian_and_hvp():
    results = []
    for m in (md, torch):
        x, y = (make(m, normal(3, seed=k)) for k in (1, 2))
        found = m.autograd.functional.jacobian(lambda x, y: x[:2] * y.sum(), (x, y))
        value, product = m.autograd.functional.hvp(lambda x: (x**3).sum() * x[0], x,
                                                   make(m, normal(3, seed=3)))
        single = m.autograd.functional.jacobian(lambda x: x.exp(), x)
        constant = m.autograd.functional.jacobian(lambda x: x.detach()[:2], x)
        results.append([*found, value, product, single, constant])
    for a, b in zip(*results):
        close(a, b)
    x = md.ones(2, dtype=md.float64)
    assert md.autograd.functional.hvp(lambda x: (x * 2).sum(), x, x)[1].tolist() == [0, 0]


def test_gradcheck_finds_mistakes():
    class Wrong(md.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 3

    x = md.randn(3, dtype=md.float64, requires_grad=True)
    assert md.autograd.gradcheck(md.sin, x)
    with pytest.raises(RuntimeError, match="the derivative is 3, the difference quotient 2"):
        md.autograd.gradcheck(Wrong.apply, (x,))
    assert not md.autograd.gradcheck(Wrong.apply, x, raise_exception=False)
    with pytest.raises(ValueError, match="needs float64, input 0 is float32"):
        md.autograd.gradcheck(md.sin, md.ones(2, requires_grad=True))


def test_anomaly_names_the_op_and_the_line():
    x = md.tensor([0.0, 1.0], requires_grad=True)
    with md.autograd.detect_anomaly():
        y = x.sqrt() * x * 0  # here
    with pytest.raises(RuntimeError, match="(?s)made the first NaN.*test_framework.py.*# here"):
        y.sum().backward()


def test_graph_as_text():
    x = md.ones(2, requires_grad=True)
    text = (x * 2).sum().graph()
    assert text.startswith("digraph {") and "sum ()" in text and "a leaf (2,)" in text
    assert text.count("->") == 2
    picture = text._repr_svg_()
    assert picture is None or "<svg" in picture
    assert "->" not in md.ones(2).graph()


# -- distributions ---------------------------------------------------------------------------------


def test_distributions():
    for make_it in (
        lambda m, p: m.distributions.Categorical(m.softmax(p, -1)),
        lambda m, p: m.distributions.Categorical(logits=p),
    ):
        check(lambda m, p, make_it=make_it: [
            make_it(m, p).log_prob(m.tensor([2, 0, 1])), make_it(m, p).entropy()], (3, 4))
        assert make_it(md, md.zeros(3, 4)).sample((5,)).shape == (5, 3)
    check(lambda m, a, b: [m.distributions.Normal(a, b.exp()).log_prob(a * 2),
                           m.distributions.Normal(a, b.exp()).entropy()], (3,), (3,))
    md.manual_seed(0)
    draws = md.distributions.Normal(md.tensor(2.0), md.tensor(0.5)).sample((20000,))
    assert abs(draws.mean().item() - 2) < 0.02 and abs(draws.std().item() - 0.5) < 0.02
    counts = md.distributions.Categorical(md.tensor([0.2, 0.0, 0.8])).sample((10000,))
    shares = np.bincount(counts.numpy(), minlength=3) / 10000
    assert abs(shares - [0.2, 0, 0.8]).max() < 0.02
    scale = md.tensor(1.0, requires_grad=True)
    assert md.distributions.Normal(0.0, scale).rsample((3,)).requires_grad
    with pytest.raises(ValueError, match="either probs or logits"):
        md.distributions.Categorical()
    with pytest.raises(ValueError, match="a scale above 0"):
        md.distributions.Normal(0.0, 0.0)


# -- initial values, random numbers ----------------------------------------------------------------


def test_initial_values():
    w = md.zeros(6, 40)
    for fill, low, high in (
        (lambda: nn.init.xavier_uniform_(w, 2.0), -2 * (6 / 46) ** 0.5, 2 * (6 / 46) ** 0.5),
        (lambda: nn.init.kaiming_uniform_(w, nonlinearity="relu"), -0.3873, 0.3873),
        (lambda: nn.init.trunc_normal_(w, 0.0, 1.0, -0.5, 0.5), -0.5, 0.5),
        (lambda: nn.init.constant_(w, 3.0), 3, 3), (lambda: nn.init.ones_(w), 1, 1),
        (lambda: w.bernoulli_(0.5), 0, 1), (lambda: nn.init.eye_(w), 0, 1),
    ):
        fill()
        assert low - 1e-4 <= w.min().item() and w.max().item() <= high + 1e-4
        assert w.max().item() > 0.7 * high
    for std, fill in ((0.3, lambda v: nn.init.normal_(v, std=0.3)),
                      ((2 / 400) ** 0.5, lambda v: nn.init.xavier_normal_(v)),
                      ((2 / 200) ** 0.5, lambda v: nn.init.kaiming_normal_(v))):
        v = md.zeros(200, 200)
        fill(v)
        assert abs(v.std().item() / std - 1) < 0.05
    for shape in ((3, 8), (8, 3), (4, 2, 2)):
        q = nn.init.orthogonal_(md.zeros(shape), 2.0).reshape(shape[0], -1)
        product = q @ q.T if shape[0] <= q.shape[1] else q.T @ q
        np.testing.assert_allclose(product.numpy(), 4 * np.eye(len(product)), atol=1e-5)
    for name in ("linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu"):
        assert nn.init.calculate_gain(name) == torch.nn.init.calculate_gain(name)
    with pytest.raises(ValueError, match="at least two dimensions"):
        nn.init.xavier_uniform_(md.zeros(3))


def test_random_tensors():
    md.manual_seed(1)
    a = md.normal(md.zeros(20000, dtype=md.float64), md.full((20000,), 2.0, dtype=md.float64))
    assert a.dtype == md.float64 and abs(a.std().item() - 2) < 0.05
    g = md.Generator().manual_seed(3)
    state = g.get_state()
    first = md.rand(3, generator=g)
    g.set_state(state)
    assert md.equal(first, md.rand(3, generator=g))
    assert sorted(md.randperm(5).tolist()) == [0, 1, 2, 3, 4]
    assert 2 <= md.randint_like(md.zeros(9), 2, 4).min() < 4
    with pytest.raises(RuntimeError, match="multinomial needs weights"):
        md.multinomial(md.tensor([1.0, -1.0]), 1)


def test_dropout_draws():
    md.manual_seed(0)
    for layer, shape in ((nn.Dropout(0.25), (100, 100)), (nn.Dropout2d(0.25), (100, 100, 2, 2))):
        x = md.ones(shape)
        y = layer(x).numpy()
        assert set(np.unique(y.round(4))) == {0, np.float32(1.3333)}
        assert abs((y == 0).mean() - 0.25) < 0.02
    assert (y == y[:, :, :1, :1]).all()
    x = md.ones(4)
    assert F.dropout(x, 1.0).tolist() == [0] * 4
    assert F.dropout(x, 0.5, True, True) is x and F.relu(x, inplace=True) is x


# -- data ------------------------------------------------------------------------------------------


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        self.threads.add(threading.current_thread().name)
        return md.tensor(float(i * i)), md.rand(1)

    def __init__(self):
        self.threads = set()


def test_threads_fetch_ahead():
    data = Squares()
    epochs = []
    for workers in (2, 3):
        md.manual_seed(5)
        loader = DataLoader(data, 3, num_workers=workers, persistent_workers=True, timeout=5)
        epochs.append([(x.tolist(), r.tolist()) for x, r in loader])
    assert epochs[0] == epochs[1] and len(epochs[0]) == 4
    assert [x for x, _ in epochs[0]][3] == [81.0]
    assert len({r[0][0] for _, r in epochs[0]}) == 4  # each batch draws its own numbers
    assert threading.current_thread().name not in data.threads

    class Broken(Squares):
        def __getitem__(self, i):
            raise KeyError("sample 7 is missing")

    with pytest.raises(KeyError, match="sample 7"):
        list(DataLoader(Broken(), num_workers=1))


def test_streams():
    class Count(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    assert [b.tolist() for b in DataLoader(Count(), 2)] == [[0, 1], [2, 3], [4]]
    assert [b.tolist() for b in DataLoader(Count(), 2, drop_last=True)] == [[0, 1], [2, 3]]


def test_samplers():
    data = md.utils.data
    md.manual_seed(0)
    weighted = data.WeightedRandomSampler([0.0, 1.0, 0.0], 4)
    assert list(weighted) == [1] * 4 and len(weighted) == 4
    assert sorted(data.SubsetRandomSampler([3, 5, 9])) == [3, 5, 9]
    parts = [list(data.DistributedSampler(range(10), 3, r, shuffle=True)) for r in range(3)]
    assert sorted(sum(parts, [])) == list(range(10))
    padded = [data.DistributedSampler(range(10), 3, r, pad=True) for r in range(3)]
    assert {len(list(s)) for s in padded} == {len(padded[0])} == {4}
    cut = data.DistributedSampler(range(10), 3, 1, drop_last=True)
    assert len(list(cut)) == len(cut) == 3
    cut.set_epoch(1)
    other = data.DistributedSampler(range(10), 3, 2)
    assert len(list(other)) == len(other) == 3
    with pytest.raises(RuntimeError, match="init_process_group"):
        data.DistributedSampler(range(4))
    with pytest.raises(ValueError, match="rank 3 is not one of 3"):
        data.DistributedSampler(range(10), 3, 3)
    for abstract in (lambda: Dataset()[0], lambda: len(Dataset()), lambda: iter(data.Sampler()),
                     lambda: iter(IterableDataset())):
        with pytest.raises(NotImplementedError, match="defines no __"):
            abstract()


# -- programs pass through, errors say what to do --------------------------------------------------


def test_there_is_nothing_besides_the_cpu():
    assert not md.cuda.is_available() and not md.backends.mps.is_available()
    assert md.cuda.manual_seed_all(0) is None and not md.accelerator.is_available()
    assert md.is_tensor(md.ones(1)) and md.finfo(md.float32).eps > 0
    assert md.ones(2).to("cpu", copy=True).to(md.device("cpu")).device.type == "cpu"
    with pytest.raises(RuntimeError, match="device 'cuda' is not available"):
        md.ones(2).to("cuda")
    layer = nn.Linear(2, 2).to(md.device("cpu")).half()
    assert layer.weight.dtype == md.float16 and layer.cpu().double().weight.dtype == md.float64


def test_every_way_to_another_device_is_refused():
    x = md.ones(2)
    for call in (x.cuda, nn.Linear(2, 2).cuda, lambda: md.ones(2, device="cuda"),
                 lambda: md.tensor([1.0], device="cuda:1"), lambda: md.as_tensor(x, device="cuda"),
                 lambda: md.randn(3, device="cuda"), lambda: md.zeros_like(x, device="cuda")):
        with pytest.raises(RuntimeError, match="device 'cuda.*' is not available"):
            call()
    assert md.rand(2, device="cpu").shape == md.rand(2, device=md.device("cpu")).shape == (2,)


def test_names_of_old_and_global_state():
    for name in "Float Double Half Byte Char Short Int Long Bool".split():
        for args in (([1, 0],), (2, 3), (2,)):
            ours, theirs = (getattr(m, name + "Tensor")(*args) for m in (md, torch))
            assert ours.shape == theirs.shape and f"torch.{ours.dtype}" == str(theirs.dtype)
    assert md.LongTensor([2**60 + 1]).item() == 2**60 + 1
    md.manual_seed(1)
    state = md.get_rng_state()
    first = md.rand(3)
    md.set_rng_state(state)
    assert md.equal(first, md.rand(3))
    before = md.get_num_threads()
    try:
        md.set_num_threads(1)
        assert md.get_num_threads() == 1
    except RuntimeError as error:  # a NumPy with another BLAS than its wheels have
        assert "before Python starts" in str(error)
    else:
        md.set_num_threads(before)
    with pytest.raises(ValueError, match="from 1"):
        md.set_num_threads(0)


def test_what_is_offered():
    names, star = dir(md), {}
    exec("from minidist import *", star)
    assert {"tensor", "nn", "optim", "sum", "float32", "launch", "save"} <= set(names)
    assert not {"np", "json", "to_array", "Op", "builtins"} & {*names, *star}
    assert {"tensor", "nn", "relu", "launch"} <= set(star)
    assert not {"sum", "float", "max", "abs", "bool"} & set(star) - {"__builtins__"}
    for name in names:
        getattr(md, name)
    assert not hasattr(md.ones(2), "names") and not hasattr(md.ones(2), "_repr_html_")


@pytest.mark.parametrize("look, words", [
    (lambda: md.compile, "'compile' .of PyTorch, it holds a chosen part.: there is nothing to"),
    (lambda: md.nn.relu, "it is in minidist.nn.functional"),
    (lambda: md.optim.StepLR, "it is in minidist.optim.lr_scheduler"),
    (lambda: md.optim.Adamw, "the nearest is 'AdamW'"),
    (lambda: md.nn.Conv3d, "minidist.nn has no 'Conv3d'.*the nearest is 'Conv2d'"),
    (lambda: md.unique, "NumPy has np.unique"),
    (lambda: md.ones(1).cumprod(0), "the nearest is 'prod'; NumPy has np.cumprod"),
    (lambda: md.ones(1).backwards(), "Tensor has no 'backwards'.*'backward'"),
    (lambda: md.distributions.Bernoulli, "there are Categorical, Normal"),
    (lambda: md.to_arry, "minidist has no 'to_arry' .of PyTorch, it holds a chosen part.$"),
])
def test_a_name_that_is_not_there(look, words):
    with pytest.raises(AttributeError, match=words):
        look()


def test_lists_of_layers():
    layers = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])
    layers.insert(0, nn.Tanh())
    layers[2] = nn.Sigmoid()
    assert [type(m).__name__ for m in layers] == ["Tanh", "Linear", "Sigmoid"]
    assert isinstance(layers[1:], nn.ModuleList) and len(layers[1:]) == 2
    steps = nn.Sequential(nn.ReLU(), nn.ReLU())
    steps[1] = nn.Tanh()
    assert type(steps[1]) is nn.Tanh and len(steps[:1]) == 1 and len(steps.append(nn.ReLU())) == 3
    named = nn.ModuleDict({"a": nn.ReLU()})
    named["b"] = nn.Tanh()
    assert list(named) == ["a", "b"] and "b" in named and len(named) == 2
    assert [k for k, _ in named.items()] == list(named.keys()) and named == named
    table = nn.Embedding.from_pretrained(md.ones(3, 2))
    assert not table.weight.requires_grad and table(md.tensor([1])).tolist() == [[1, 1]]


@pytest.mark.parametrize("call, words", [
    (lambda: F.softmax(md.ones(2, 3)), "needs dim"),
    (lambda: F.glu(md.ones(3)), "odd size 3"),
    (lambda: F.one_hot(md.tensor([3]), 2), "from 3 to 3 in 2 classes"),
    (lambda: F.pad(md.ones(3), (1, 1), "reflect"), "'constant' is"),
    (lambda: F.interpolate(md.ones(1, 1, 3), 2, mode="cubic"), "nearest, linear, bilinear"),
    (lambda: F.mse_loss(md.ones(2), md.ones(2), reduction="average"), "'mean', 'sum' or 'none'"),
    (lambda: F.max_pool2d(md.ones(1, 1, 4, 4), 2, padding=2), "at most half"),
    (lambda: F.avg_pool1d(md.ones(1, 1, 2), 5), "does not fit"),
    (lambda: F.conv_transpose2d(md.ones(1, 2, 3, 3), md.ones(1, 1, 2, 2)), "takes inputs"),
    (lambda: F.conv_transpose1d(md.ones(1, 1, 3), md.ones(1, 1, 2), output_padding=1),
     "smaller than stride"),
    (lambda: F.conv1d(md.ones(1, 1, 5), md.ones(1, 1, 3), stride=2, padding="same"), "stride 1"),
    (lambda: F.group_norm(md.ones(1, 3, 2), 2), "3 channels do not divide into 2 groups"),
    (lambda: nn.GroupNorm(2, 3), "2 groups do not divide 3"),
    (lambda: nn.MultiheadAttention(4, 3), "3 heads do not divide"),
    (lambda: nn.MultiheadAttention(4, 2, kdim=3), "as wide as queries"),
    (lambda: nn.LSTM(2, 2, proj_size=1), "proj_size is not available"),
    (lambda: nn.LSTM(2, 2)(md.ones(3, 1, 4)), "takes 2 features"),
    (lambda: nn.GRU(2, 2)(md.ones(3, 1, 2), md.ones(1, 2, 2)), "initial state of shape"),
    (lambda: nn.ReLU(3, 4), "ReLU takes"),
    (lambda: nn.Dropout(2.0), "between 0 and 1"),
    (lambda: md.mm(md.ones(2), md.ones(2)), "mm takes matrices"),
    (lambda: md.einsum("ij,jk", md.ones(2, 2)), "names 2 operands, got 1"),
    (lambda: md.einsum("ijk->i", md.ones(2, 2)), "operand 0 has 2 dimensions"),
    (lambda: md.cat([]), "at least one"),
    (lambda: md.ones(4).split([1, 2]), "do not add up to 4"),
    (lambda: md.ones(4).topk(5), "size 4"),
    (lambda: md.ones(2, 3).norm("nuc"), "'fro'"),
    (lambda: md.div(md.ones(2), 2, rounding_mode="up"), "None, 'trunc' or 'floor'"),
    (lambda: md.matmul(md.ones(()), md.ones(2)), "at least one dimension"),
    (lambda: md.optim.SGD([], 0.1), "no parameters"),
    (lambda: md.optim.SGD([md.ones(1)], lr=-1), r"lr must lie in \[0, inf\), found -1"),
    (lambda: md.optim.Adam([md.ones(1)], betas=(1.0, 0.9)), r"betas must lie in"),
    (lambda: md.optim.Adam([md.ones(1)], rate=1), "takes .*lr=0.001.*keyword argument 'rate'"),
    (lambda: md.optim.Adam([md.ones(1)], differentiable=True), "not recorded"),
    (lambda: md.optim.SGD([md.ones(1)], nesterov=True), "momentum > 0"),
    (lambda: md.optim.LBFGS([md.ones(1)], line_search_fn="armijo"), "'strong_wolfe'"),
    (lambda: md.optim.LBFGS([md.ones(1)]).step(), "needs a closure"),
    (lambda: md.optim.LBFGS([{"params": [md.ones(1)]}, {"params": [md.ones(1)]}]), "one param"),
    (lambda: DataLoader([1], 0), "at least 1"),
    (lambda: DataLoader([1], shuffle=True, sampler=[0]), "leave out shuffle"),
    (lambda: TensorDataset(md.ones(2), md.ones(3)), "one per sample"),
])
def test_errors_say_what_to_do(call, words):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        call()


def test_schedules_refuse():
    optimizer = md.optim.SGD([md.ones(1)], 0.1)
    schedules = md.optim.lr_scheduler
    for call, words in (
        (lambda: schedules.OneCycleLR(optimizer, 0.1, epochs=3), "needs total_steps"),
        (lambda: schedules.SequentialLR(optimizer, [], [1]), "schedules need"),
        (lambda: schedules.StepLR(optimizer), "StepLR takes"),
        (lambda: [schedules.OneCycleLR(optimizer, 0.1, 2, cycle_momentum=False).step()
                  for _ in range(1)] and [s.step() for s in [
                      schedules.OneCycleLR(optimizer, 0.1, 2, cycle_momentum=False)] * 3],
         "made for 2 steps"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
    adam = md.optim.Adam([md.ones(1)], 0.1)
    schedules.OneCycleLR(adam, 0.1, 10)
    assert math.isclose(adam.param_groups[0]["betas"][0], 0.95)


def test_programs_ask_where_a_tensor_is():
    x = md.ones(2, 3)
    assert not x.is_cuda and x.pin_memory() is x.cpu() is x and x.stride() == (3, 1)
    assert x.type(md.int64).dtype == md.int64
    with pytest.raises(RuntimeError, match="'cuda' is not available"):
        x.cuda()
