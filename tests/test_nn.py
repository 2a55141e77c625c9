"""Sections 3 and 4 against PyTorch: functions, layers, losses, and the machinery of modules."""
import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
import minidist.nn as nn
import minidist.nn.functional as F
from oracle import both_raise, check, close, driven, integers, make, normal, positive, torch

TABLE: list = []


def case(name, function, *inputs, **options):
    TABLE.append((name, function, inputs, options))


# -- functions -------------------------------------------------------------------------------------

KINKS = np.array([-30.0, -3, -1, -0.5, 0, 0.5, 1, 3, 30])
for n in "relu leaky_relu elu softplus silu logsigmoid gelu tanh sigmoid".split():
    case(n, lambda m, x, n=n: getattr(m.nn.functional, n)(x), (3, 4))
    case(n, lambda m, x, n=n: getattr(m.nn.functional, n)(x), KINKS,
         orders=1 if n in ("elu", "softplus") else 2)  # at their kinks, second derivatives differ
case("leaky_relu", lambda m, x: m.nn.functional.leaky_relu(x, 0.3), (3, 4))
case("elu", lambda m, x: m.nn.functional.elu(x, alpha=0.7), (3, 4))
case("softplus", lambda m, x: m.nn.functional.softplus(x, beta=2, threshold=1), (3, 4), orders=1)
case("gelu", lambda m, x: m.nn.functional.gelu(x, approximate="tanh"), KINKS)
for n in "softmax log_softmax".split():
    case(n, lambda m, x, n=n: getattr(m.nn.functional, n)(x, dim=1), (2, 3, 4))
    case(n, lambda m, x, n=n: getattr(m.nn.functional, n)(x * 1000, dim=-1), (2, 3))
case("relu", lambda m, x: m.nn.functional.relu(x), integers(5, low=-5))

case("linear", lambda m, x, w, b: m.nn.functional.linear(x, w, b), (5, 3), (2, 3), (2,))
case("linear", lambda m, x, w: m.nn.functional.linear(x, w), (2, 5, 3), (2, 3))
case("linear", lambda m, x, w, b: m.nn.functional.linear(x, w, b), (3,), (2, 3), (2,))
case("linear", lambda m, x, w, b: m.nn.functional.linear(x, w, b), (0, 3), (2, 3), (2,))

for stride, padding, dilation, groups in itertools.product((1, 2), (0, 1, "same"), (1, 2), (1, 2)):
    if padding == "same" and stride > 1:
        continue
    case("conv1d", lambda m, x, w, b, a=(stride, padding, dilation, groups):
         m.nn.functional.conv1d(x, w, b, *a), (2, 4, 9), (6, 4 // groups, 3), (6,), factor=3)
    case("conv2d", lambda m, x, w, b, a=(stride, padding, dilation, groups):
         m.nn.functional.conv2d(x, w, b, *a), (2, 4, 7, 6), (2, 4 // groups, 3, 2), (2,), factor=9)
case("conv2d", lambda m, x, w: m.nn.functional.conv2d(x, w, stride=(2, 1), padding=(0, 1)),
     (1, 2, 5, 6), (3, 2, 2, 3), factor=3)
case("conv2d", lambda m, x, w: m.nn.functional.conv2d(x, w, padding="valid"), (1, 2, 5, 6),
     (3, 2, 2, 3), factor=3)
case("conv2d", lambda m, x, w: m.nn.functional.conv2d(x, w), (2, 5, 6), (3, 2, 2, 3), factor=3)
case("conv2d", lambda m, x, w: m.nn.functional.conv2d(x, w), (2, 3, 4, 4), (5, 3, 1, 1), factor=3)
case("conv2d", lambda m, x, w, b: m.nn.functional.conv2d(x, w, b, groups=4), (2, 4, 5, 5),
     (8, 1, 3, 3), (8,), factor=3)
case("conv2d", lambda m, x, w, b: m.nn.functional.conv2d(x, w, b), (0, 2, 5, 5), (3, 2, 2, 2), (3,))

for kernel, stride, padding, dilation, ceil in itertools.product(
        (2, 3), (None, 1, 2), (0, 1), (1, 2), (False, True)):
    case("max_pool2d", lambda m, x, a=(kernel, stride, padding, dilation, ceil):
         m.nn.functional.max_pool2d(x, *a), (2, 3, 8, 7))
case("max_pool1d", lambda m, x: m.nn.functional.max_pool1d(x, 3, 2, 1), (2, 3, 8))
case("max_pool1d", lambda m, x: m.nn.functional.max_pool1d(x, 3, stride=1, padding=1),
     np.array([[[-1.0, -2.0]]]))
case("max_pool2d", lambda m, x: m.nn.functional.max_pool2d(x, (2, 3), (1, 2)), (3, 5, 6))
case("max_pool2d", lambda m, x: m.nn.functional.max_pool2d(x, 2), np.zeros((1, 1, 4, 4)))
case("max_pool2d", lambda m, x: m.nn.functional.max_pool2d(x, 2), (0, 1, 4, 4))

for shape in ((6, 3), (4, 3, 5), (4, 3, 2, 2)):
    case("batch_norm", lambda m, x, w, b: m.nn.functional.batch_norm(
        x, None, None, w, b, training=True), shape, (3,), (3,), factor=9)
    case("batch_norm", lambda m, x, mean, var, w, b: m.nn.functional.batch_norm(
        x, mean.detach(), var.detach(), w, b), shape, (3,), positive(3), (3,), (3,), factor=3)
case("batch_norm", lambda m, x, mean, var: (m.nn.functional.batch_norm(
    x, mean.detach(), var.detach(), training=True, momentum=0.3), mean, var), (6, 3), (3,),
    positive(3), factor=9)
case("layer_norm", lambda m, x, w, b: m.nn.functional.layer_norm(x, (4,), w, b), (2, 3, 4), (4,),
     (4,), factor=9)
case("layer_norm", lambda m, x: m.nn.functional.layer_norm(x, [3, 4], eps=1e-3), (2, 3, 4),
     factor=9)
case("layer_norm", lambda m, x: m.nn.functional.layer_norm(x, (4,)), (0, 4))

case("embedding", lambda m, i, w: m.nn.functional.embedding(i, w), integers(2, 3), (5, 4))
case("embedding", lambda m, i, w: m.nn.functional.embedding(i, w, padding_idx=-4), integers(9),
     (5, 4))
case("one_hot", lambda m, i: m.nn.functional.one_hot(i), integers(2, 3))
case("one_hot", lambda m, i: m.nn.functional.one_hot(i, 7), integers(4))
for widths in ((1, 2), (1, 0, 2, 3), (-1, 1), (0, 0, 1, -1)):
    case("pad", lambda m, x, w=widths: m.nn.functional.pad(x, w), (3, 4))
case("pad", lambda m, x: m.nn.functional.pad(x, (1, 1), value=2.5), (3, 4))
case("pad", lambda m, x: m.nn.functional.pad(x, (1, 1)), integers(3))
case("dropout", lambda m, x: m.nn.functional.dropout(x, 0.5, training=False), (3, 4))
case("dropout", lambda m, x: m.nn.functional.dropout(x, 0.0), (3, 4))
case("dropout", lambda m, x: m.nn.functional.dropout(x, 1.0), (3, 4))

# Fused ops work on blocks: sizes beyond one. (Second derivatives are those of the compositions,
# whatever the size.)
LARGE: dict = {"dtypes": ["float32"], "orders": 1}
for inputs in (((2100, 128), (128,), (128,)), ((60, 35), (35,), (35,))):
    case("layer_norm", lambda m, x, w, b: m.nn.functional.layer_norm(x, w.shape, w, b), *inputs,
         factor=99, **LARGE)
case("batch_norm", lambda m, x, w, b: m.nn.functional.batch_norm(
    x, None, None, w, b, training=True), (19, 24, 24, 25), (24,), (24,), factor=99, **LARGE)
for approximate in ("none", "tanh"):
    case("gelu", lambda m, x, a=approximate: m.nn.functional.gelu(x * 3, approximate=a),
         (67, 4000), factor=3, **LARGE)
for causal, shape, keys in itertools.product(
        (True, False), ((2, 3, 150, 8), (40, 100, 4), (7, 2, 150, 4)), (1, 0.7)):
    case("scaled_dot_product_attention", lambda m, q, k, v, c=causal:
         m.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c), shape,
         (*shape[:-2], int(shape[-2] * keys), shape[-1]), (*shape[:-2], int(shape[-2] * keys), 5),
         factor=99, **LARGE)
case("scaled_dot_product_attention", lambda m, q, k, v:
     m.nn.functional.scaled_dot_product_attention(q * 30, k * 30, v, is_causal=True), (2, 40, 8),
     (2, 40, 8), (2, 40, 3), dtypes=["float64"], factor=9)  # exp would overflow
# One tensor as two inputs, and an input computed from another: a gradient for each place.
case("layer_norm", lambda m, x: m.nn.functional.layer_norm(x, (5,), x, x * 2), (5,), factor=9)
case("embedding", lambda m, i, w: m.nn.functional.embedding(i, w), integers(30, 40, high=7), (9, 3),
     factor=9, **LARGE)
case("conv2d", lambda m, x, w, b: m.nn.functional.conv2d(x, w, b, padding=1), (25, 16, 26, 26),
     (16, 16, 3, 3), (16,), factor=999, **LARGE)
case("conv2d", lambda m, x, w, b: m.nn.functional.conv2d(x, w, b), (40, 6, 12, 12), (32, 6, 5, 5),
     (32,), factor=999, **LARGE)
case("conv2d", lambda m, x, w, b: m.nn.functional.conv2d(x, w, b, stride=2, groups=2),
     (25, 16, 26, 26), (40, 8, 3, 3), (40,), factor=999, **LARGE)

case("conv2d", lambda m, x, w: m.nn.functional.conv2d(x, w, stride=(2, 1), dilation=(1, 2)),
     (9, 40, 9, 11), (6, 40, 3, 3), factor=999, **LARGE)
case("conv1d", lambda m, x, w: m.nn.functional.conv1d(x, w, padding=1), (9, 40, 30), (6, 40, 3),
     factor=999, **LARGE)

# -- losses ----------------------------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "none")
for r in REDUCTIONS:
    for n in "mse_loss l1_loss".split():
        case(n, lambda m, x, y, n=n, r=r: getattr(m.nn.functional, n)(x, y, reduction=r), (3, 4),
             (3, 4))
    case("binary_cross_entropy_with_logits", lambda m, x, y, r=r:
         m.nn.functional.binary_cross_entropy_with_logits(x * 9, y, reduction=r), (3, 4),
         positive(3, 4) / 9)
    case("binary_cross_entropy_with_logits", lambda m, x, y, w, p, r=r:
         m.nn.functional.binary_cross_entropy_with_logits(x, y.detach(), w.detach(),
                                                          pos_weight=p.detach(), reduction=r),
         (3, 4), positive(3, 4) / 9, positive(4), positive(4))
    case("nll_loss", lambda m, x, t, r=r: m.nn.functional.nll_loss(x, t, reduction=r), (4, 5),
         integers(4))
    case("nll_loss", lambda m, x, t, w, r=r: m.nn.functional.nll_loss(
        x, t, w.detach(), ignore_index=2, reduction=r), (2, 5, 3, 2), integers(2, 3, 2),
        positive(5))
    case("nll_loss", lambda m, x, t, r=r: m.nn.functional.nll_loss(x, t, reduction=r), (5,),
         np.array(3))
    for smoothing in (0.0, 0.2):
        def options(m, r=r, s=smoothing):
            return {"reduction": r, "label_smoothing": s}

        case("cross_entropy", lambda m, x, t, o=options: m.nn.functional.cross_entropy(
            x, t, **o(m)), (4, 5), integers(4))
        case("cross_entropy", lambda m, x, t, o=options: m.nn.functional.cross_entropy(
            x, t, **o(m)), (2, 5, 3), integers(2, 3))
        case("cross_entropy", lambda m, x, t, o=options: m.nn.functional.cross_entropy(
            x, t, **o(m)), (5,), np.array(2))
        case("cross_entropy", lambda m, x, t, w, o=options: m.nn.functional.cross_entropy(
            x, t, w.detach(), ignore_index=1, **o(m)), (6, 5), integers(6), positive(5))
        case("cross_entropy", lambda m, x, t, o=options: m.nn.functional.cross_entropy(
            x, t.softmax(1), **o(m)), (4, 5), (4, 5))
        case("cross_entropy", lambda m, x, t, w, o=options: m.nn.functional.cross_entropy(
            x, t.softmax(1), w.detach(), **o(m)), (2, 5, 3), (2, 5, 3), positive(5))
case("cross_entropy", lambda m, x, t: m.nn.functional.cross_entropy(x * 1e4, t), (4, 5),
     integers(4))
case("cross_entropy", lambda m, x, t: m.nn.functional.cross_entropy(x, t), (3, 5),
     np.full(3, -100), orders=1)
case("cross_entropy", lambda m, x, t: m.nn.functional.cross_entropy(x, t, reduction="sum"), (0, 5),
     integers(0))


@pytest.mark.parametrize("name, function, inputs, options", TABLE,
                         ids=[f"{row[0]}-{i}" for i, row in enumerate(TABLE)])
def test_function(name, function, inputs, options):
    check(function, *inputs, **options)


def test_table_is_complete():
    public = {n for n in dir(F) if not n.startswith("_")}
    assert public - driven() <= {row[0] for row in TABLE}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_convolutions_of_any_size(data):
    draw = data.draw
    kernel, stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
                                for _ in range(3))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = [draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 8))
            for k, d, p in zip(kernel, dilation, padding)]
    groups = draw(st.integers(1, 2))
    batch, channels, out = draw(st.integers(1, 2)), 2 * groups, groups * draw(st.integers(1, 2))
    check(lambda m, x, w, b: m.nn.functional.conv2d(x, w, b, stride, padding, dilation, groups),
          (batch, channels, *size), (out, 2, *kernel), (out,), dtypes=["float64"])


def test_dropout():
    md.manual_seed(0)
    x = md.ones(10_000, requires_grad=True)
    y = F.dropout(x, 0.25)
    kept = y.detach().numpy() != 0
    assert abs(kept.mean() - 0.75) < 0.02 and y.dtype == md.float32
    np.testing.assert_allclose(y.detach().numpy()[kept], 4 / 3, rtol=1e-6)
    (y * 2).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.detach().numpy() * 2)
    (g,) = md.autograd.grad((F.dropout(x * x) ** 2).sum(), x, create_graph=True)
    g.sum().backward()  # one mask for both derivatives
    assert F.dropout(md.ones(9, dtype=md.float64)).dtype == md.float64
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, p)


def test_errors_name_shapes_and_cures():
    x, image = md.ones(2, 3), md.ones(1, 2, 5, 5)
    for function, words in (
        (lambda: F.linear(x, md.ones(4, 5)), r"5 features.*\(2, 3\)"),
        (lambda: F.conv2d(image, md.ones(4, 3, 2, 2)), r"\(batch, 3, 2 sizes\).*\(1, 2, 5, 5\)"),
        (lambda: F.conv2d(image, md.ones(4, 2, 9, 9)), r"spans \(9, 9\)"),
        (lambda: F.conv2d(image, md.ones(3, 1, 2, 2), groups=2), "divide"),
        (lambda: F.conv2d(image, md.ones(3, 2, 2, 2), stride=2, padding="same"), "stride 1"),
        (lambda: F.max_pool2d(image, 2, padding=2), "half"),
        (lambda: F.max_pool2d(image, 9), "does not fit"),
        (lambda: F.layer_norm(x, (4,)), r"\(4,\).*\(2, 3\)"),
        (lambda: F.batch_norm(md.ones(1, 3), None, None, training=True), "more than one value"),
        (lambda: F.mse_loss(md.ones(3, 1), md.ones(3)), r"\(3, 1\).*\(3,\).*unsqueeze"),
        (lambda: F.mse_loss(x, x, reduction="avg"), "'mean', 'sum' or 'none'"),
        (lambda: F.cross_entropy(x, md.tensor([0, 3])), "0 to 2.*0 to 3"),
        (lambda: F.cross_entropy(x, md.tensor([0, 1, 1])), r"\(2,\), not \(3,\)"),
        (lambda: F.cross_entropy(x, md.tensor([0, -1])), "found"),
        (lambda: F.embedding(md.tensor([5]), x), "5 to 5.*rows 0 to 1"),
        (lambda: F.embedding(md.tensor([0.5]), x), "integer"),
        (lambda: F.pad(x, (1, 1), mode="reflect"), "reflect"),
    ):
        with pytest.raises((RuntimeError, ValueError, IndexError, TypeError), match=words):
            function()
    both_raise(lambda m, x, y: m.nn.functional.cross_entropy(x, y), (2, 3), integers(3))


# -- layers ----------------------------------------------------------------------------------------

LAYERS = [  # (constructor, input)
    (lambda m: m.nn.Linear(3, 4), normal(5, 3)),
    (lambda m: m.nn.Linear(3, 4, bias=False), normal(2, 5, 3)),
    (lambda m: m.nn.Conv1d(2, 4, 3, padding=1), normal(2, 2, 6)),
    (lambda m: m.nn.Conv2d(2, 4, 3), normal(2, 2, 6, 6)),
    (lambda m: m.nn.Conv2d(2, 4, (3, 2), stride=2, padding="valid", bias=False),
     normal(2, 2, 6, 6)),
    (lambda m: m.nn.Conv2d(2, 4, 3, padding=(1, 2), dilation=2, groups=2), normal(2, 2, 6, 6)),
    (lambda m: m.nn.MaxPool1d(2), normal(2, 2, 6)),
    (lambda m: m.nn.MaxPool2d(3, 2, 1, ceil_mode=True), normal(2, 2, 6, 6)),
    (lambda m: m.nn.MaxPool2d((2, 3)), normal(2, 2, 6, 6)),
    (lambda m: m.nn.BatchNorm1d(3), normal(5, 3)),
    (lambda m: m.nn.BatchNorm1d(3, affine=False), normal(5, 3, 2)),
    (lambda m: m.nn.BatchNorm2d(3, eps=1e-3, momentum=0.2), normal(5, 3, 2, 2)),
    (lambda m: m.nn.BatchNorm2d(3, momentum=None, bias=False), normal(5, 3, 2, 2)),
    (lambda m: m.nn.BatchNorm1d(3, track_running_stats=False), normal(5, 3)),
    (lambda m: m.nn.LayerNorm(4), normal(2, 3, 4)),
    (lambda m: m.nn.LayerNorm((3, 4), elementwise_affine=False), normal(2, 3, 4)),
    (lambda m: m.nn.LayerNorm([4], bias=False), normal(2, 3, 4)),
    (lambda m: m.nn.Embedding(5, 4), integers(3, 2)),
    (lambda m: m.nn.Embedding(5, 4, padding_idx=1), integers(3, 2)),
    (lambda m: m.nn.Dropout(0.0), normal(3)), (lambda m: m.nn.Identity(3, x=1), normal(3)),
    (lambda m: m.nn.Flatten(), normal(2, 3, 4)), (lambda m: m.nn.Flatten(0, 1), normal(2, 3, 4)),
    (lambda m: m.nn.ReLU(), normal(9)), (lambda m: m.nn.ReLU(inplace=True), normal(9)),
    (lambda m: m.nn.Tanh(), normal(9)), (lambda m: m.nn.Sigmoid(), normal(9)),
    (lambda m: m.nn.GELU(), normal(9)), (lambda m: m.nn.GELU(approximate="tanh"), normal(9)),
    (lambda m: m.nn.GELU("tanh"), normal(9)), (lambda m: m.nn.SiLU(), normal(9)),
    (lambda m: m.nn.LeakyReLU(0.2), normal(9)), (lambda m: m.nn.ELU(0.5), normal(9)),
    (lambda m: m.nn.LeakyReLU(0.2, inplace=True), normal(9)),
    (lambda m: m.nn.Softplus(), normal(9)), (lambda m: m.nn.LogSigmoid(), normal(9)),
    (lambda m: m.nn.Softmax(dim=1), normal(2, 3)), (lambda m: m.nn.LogSoftmax(1), normal(2, 3)),
    (lambda m: m.nn.Sequential(m.nn.Linear(3, 4), m.nn.ReLU(), m.nn.Linear(4, 2)), normal(5, 3)),
]
NAMES = [f"{i}-{make_layer(torch)}".split("\n")[0] for i, (make_layer, _) in enumerate(LAYERS)]


def twins(make_layer, dtype=md.float64):
    """minidist's layer and torch's with the same weights; torch's names must be ours."""
    ours, theirs = make_layer(md).to(dtype), make_layer(torch).to(getattr(torch, dtype.name))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("make_layer, x", LAYERS, ids=NAMES)
def test_layer(make_layer, x):
    """Outputs, gradients and running statistics, over training steps and then in eval."""
    ours, theirs = twins(make_layer)
    assert repr(ours) == repr(theirs)
    for mode in (True, True, False):
        ours.train(mode), theirs.train(mode)
        results = []
        for m, layer in ((md, ours), (torch, theirs)):
            value = make(m, x)
            out = layer(value * 1)
            if out.requires_grad:
                (out * make(m, normal(*out.shape, seed=5), False)).sum().backward()
            results.append([out, value.grad, *(p.grad for p in layer.parameters()),
                            *layer.state_dict().values()])
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


LOSSES = [
    (lambda m: m.nn.MSELoss(), normal(3, 4)),
    (lambda m: m.nn.L1Loss(reduction="sum"), normal(3, 4)),
    (lambda m: m.nn.CrossEntropyLoss(), integers(3)),
    (lambda m: m.nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0), integers(3)),
    (lambda m: m.nn.CrossEntropyLoss(weight=make(m, positive(4), False)), integers(3, high=4)),
    (lambda m: m.nn.NLLLoss(), integers(3, high=4)),
    (lambda m: m.nn.BCEWithLogitsLoss(), positive(3, 4) / 9),
    (lambda m: m.nn.BCEWithLogitsLoss(pos_weight=make(m, positive(4), False)), positive(3, 4) / 9),
]


@pytest.mark.parametrize("i", range(len(LOSSES)))
def test_loss_modules(i):
    make_loss, target = LOSSES[i]
    target = target % 4 if target.dtype.kind == "i" else target
    check(lambda m, x, t: make_loss(m)(x, t.detach()), (3, 4), target, dtypes=["float64"])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(norm_first, batch_first):
    """Encoder and decoder with masks of both kinds; weights from PyTorch by name."""
    options = dict(batch_first=batch_first, norm_first=norm_first, dropout=0.0)
    with warnings.catch_warnings(action="ignore"):
        theirs = torch.nn.Transformer(8, 2, 2, 2, 16, **options).double()
    ours = nn.Transformer(8, 2, 2, 2, 16, **options).double()
    ours.load_state_dict({n: md.tensor(t.numpy()) for n, t in theirs.state_dict().items()})
    assert repr(ours) == repr(theirs)
    draw, padding = np.random.default_rng(0), np.zeros((3, 5), bool)
    padding[1, 3:] = True
    source, target = draw.standard_normal((3, 5, 8)), draw.standard_normal((3, 4, 8))
    if not batch_first:
        source, target = source.swapaxes(0, 1).copy(), target.swapaxes(0, 1).copy()
    grads = []
    for m, model in ((md, ours), (torch, theirs)):
        mask = m.nn.Transformer.generate_square_subsequent_mask(4, dtype=m.float64)
        out = model(m.tensor(source), m.tensor(target), tgt_mask=mask,
                    src_key_padding_mask=m.tensor(padding),
                    memory_key_padding_mask=m.tensor(padding))
        (out * out).sum().backward()
        grads.append([out.detach().numpy(), *(p.grad.numpy() for p in model.parameters())])
    for a, b in zip(*grads):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_no_slope_where_all_targets_are_ignored(smoothing):
    """A batch of padding alone: the mean of nothing is NaN, but no weight learns from it."""
    for m in (md, torch):
        x = m.tensor(normal(2, 3).astype("f"), requires_grad=True)
        loss = m.nn.functional.cross_entropy(x, m.tensor([1, 1]), ignore_index=1,
                                             label_smoothing=smoothing)
        loss.backward()
        assert np.isnan(loss.item()) and not x.grad.numpy().any()


def test_a_nan_wins_its_pooling_window():
    array = normal(1, 2, 4, 4)
    array[0, 0, 0, 1] = array[0, 1, 1:3, 2] = np.nan
    found = []
    for m in (md, torch):
        x = m.tensor(array, requires_grad=True)
        out, index = m.nn.functional.max_pool2d(x, 2, return_indices=True)
        out.sum().backward()
        found.append((out.detach().numpy(), index.numpy(), x.grad.numpy()))
    for ours, theirs in zip(*found):
        np.testing.assert_array_equal(ours, theirs)


def test_every_module_is_tested():
    tested = {type(m).__name__ for make_layer, _ in (*LAYERS, *LOSSES)
              for m in make_layer(md).modules()}
    tested |= {type(m).__name__ for m in nn.Transformer(4, 1, 1, 1, 4).modules()}  # see below
    apart = {"Module", "ModuleList", "ModuleDict", "ParameterList", "Parameter", "Buffer"}
    public = {n for n, v in vars(nn).items() if isinstance(v, type)} - apart
    assert public - tested - {"DistributedDataParallel"} <= driven()


class LeNet:
    """The same text for both libraries."""

    @staticmethod
    def build(m):
        class Net(m.nn.Module):
            def __init__(self):
                super().__init__()
                self.features = m.nn.Sequential(
                    m.nn.Conv2d(1, 6, 3, padding=1), m.nn.BatchNorm2d(6), m.nn.ReLU(),
                    m.nn.MaxPool2d(2), m.nn.Conv2d(6, 8, 3), m.nn.Tanh(), m.nn.MaxPool2d(2))
                self.head = m.nn.Linear(8, 10)

            def forward(self, x):
                return self.head(self.features(x).flatten(1))

        return Net()


def test_a_network_trains_as_in_torch():
    ours, theirs = twins(LeNet.build)
    assert repr(ours) == repr(theirs)
    losses = []
    for m, net in ((md, ours), (torch, theirs)):
        optimizer = m.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x, y = make(m, normal(16, 1, 8, 8), False), make(m, integers(16, high=10))
        losses.append([])
        for _ in range(20):
            loss = m.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        net.eval()
        losses[-1] += net(x).detach().flatten().tolist()
    np.testing.assert_allclose(*losses, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make_layer", [
    lambda m: m.nn.Linear(50, 400), lambda m: m.nn.Conv2d(8, 100, 3, groups=2),
    lambda m: m.nn.Conv1d(8, 300, 5), lambda m: m.nn.Embedding(300, 50),
    lambda m: m.nn.BatchNorm2d(40), lambda m: m.nn.LayerNorm(40),
], ids=["Linear", "Conv2d", "Conv1d", "Embedding", "BatchNorm2d", "LayerNorm"])
def test_initial_distributions(make_layer):
    md.manual_seed(0), torch.manual_seed(0)
    for (name, ours), (_, theirs) in zip(make_layer(md).named_parameters(),
                                         make_layer(torch).named_parameters()):
        a, b = ours.detach().numpy(), theirs.detach().numpy()
        assert a.dtype == b.dtype and a.shape == b.shape
        if b.std() == 0:
            np.testing.assert_array_equal(a, b)
        else:
            n = a.size
            assert abs(a.mean()) < 5 * b.std() / math.sqrt(n), name
            assert abs(a.std() / b.std() - 1) < 5 / math.sqrt(n), name
            assert np.abs(a).max() < 1.5 * np.abs(b).max(), name


@pytest.mark.parametrize("name, arguments", [
    ("uniform_", (-1, 3)), ("normal_", (1.0, 2.0)), ("xavier_uniform_", (2.0,)),
    ("xavier_normal_", ()), ("kaiming_uniform_", (1,)), ("kaiming_normal_", (0, "fan_out", "relu")),
    ("kaiming_uniform_", (math.sqrt(5),)), ("trunc_normal_", (0.0, 1.0, -1.0, 0.5)),
    ("constant_", (3.0,)), ("zeros_", ()), ("ones_", ()),
])
def test_init(name, arguments):
    md.manual_seed(0), torch.manual_seed(0)
    results = []
    for m in (md, torch):
        w = m.nn.Parameter(m.empty(60, 20, 3, 3))
        assert getattr(m.nn.init, name)(w, *arguments) is w and w.requires_grad
        results.append(w.detach().numpy())
    a, b = results
    assert abs(a.mean() - b.mean()) <= 6 * b.std() / math.sqrt(a.size)
    assert abs(a.std() - b.std()) <= 0.03 * b.std()
    assert a.max() <= b.max() + 0.3 * abs(b.max())
    both_raise(lambda m, x: m.nn.init.kaiming_normal_(x), np.zeros(3))
    for kind in ("linear", "conv2d", "sigmoid", "tanh", "relu", "selu"):
        assert nn.init.calculate_gain(kind) == torch.nn.init.calculate_gain(kind)
    assert nn.init.calculate_gain("leaky_relu", 0.2) == torch.nn.init.calculate_gain(
        "leaky_relu", 0.2)


# -- the machinery of modules ----------------------------------------------------------------------


def tree(m):
    class Block(m.nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.linear = m.nn.Linear(2, 2)
            self.shared = shared
            self.register_buffer("count", m.zeros(1))
            self.register_buffer("scratch", m.zeros(1), persistent=False)
            self.register_buffer("nothing", None)
            self.register_parameter("absent", None)
            self.scale = m.nn.Parameter(m.ones(2))

        def forward(self, x):
            return self.shared(self.linear(x)) * self.scale

    shared = m.nn.Linear(2, 2, bias=False)
    return m.nn.Sequential(Block(shared), m.nn.ModuleList([Block(shared), m.nn.Identity()]),
                           m.nn.ModuleDict({"a": m.nn.ReLU(), "b": Block(shared)}),
                           m.nn.ParameterList([m.nn.Parameter(m.zeros(3))]))


def test_trees_of_modules_are_walked_as_in_torch():
    def facts(m):
        net = tree(m)
        return {
            "parameters": [n for n, _ in net.named_parameters()],
            "all parameters": [n for n, _ in net.named_parameters(remove_duplicate=False)],
            "own": [n for n, _ in net[0].named_parameters(recurse=False)],
            "prefix": [n for n, _ in net[0].named_parameters(prefix="p")],
            "count": len(list(net.parameters())),
            "buffers": [n for n, _ in net.named_buffers()],
            "buffer count": len(list(net.buffers())),
            "modules": [n for n, _ in net.named_modules()], "all": len(list(net.modules())),
            "children": [n for n, _ in net.named_children()], "direct": len(list(net.children())),
            "state": list(net.state_dict()), "prefixed": list(net.state_dict(prefix="x."))[:3],
            "submodule": type(net.get_submodule("2.b.linear")).__name__,
            "lengths": (len(net), len(net[1]), len(net[2]), len(net[3])),
            "slice": len(net[:2]), "negative": type(net[-1]).__name__, "keys": list(net[2].keys()),
            "in": "a" in net[2], "items": [k for k, _ in net[2].items()],
            "iter": [type(x).__name__ for x in net],
        }

    ours, theirs = facts(md), facts(torch)
    for name in theirs:
        assert ours[name] == theirs[name], name


def test_printing():
    text = repr(tree(torch)).replace("torch.float32 of size", "torch.FloatTensor of size")
    ours, theirs = (t.split("(3): ParameterList")[0] for t in (repr(tree(md)), text))
    assert ours == theirs


def test_containers_change():
    for m in (md, torch):
        net = m.nn.Sequential(m.nn.Linear(1, 1))
        net.append(m.nn.ReLU())
        layers = m.nn.ModuleList()
        layers.append(m.nn.ReLU())
        layers.extend([m.nn.Tanh(), m.nn.Linear(1, 1)])
        layers[0] = m.nn.Linear(2, 1)
        names = m.nn.ModuleDict()
        names["x"] = m.nn.Linear(1, 1)
        named = m.nn.Sequential({"in": m.nn.Linear(1, 1)} if m is md else
                                __import__("collections").OrderedDict({"in": m.nn.Linear(1, 1)}))
        params = m.nn.ParameterList([m.nn.Parameter(m.ones(1))])
        params.append(m.nn.Parameter(m.zeros(2)))
        assert params[1].shape == (2,) and [len(p) for p in params] == [1, 2]
        assert len(layers[1:]) == 2 and layers[-1] is layers[2] and list(names) == ["x"]
        assert names["x"] in list(names.values())
        assert [list(c.state_dict()) for c in (net, layers, names, named)] == [
            ["0.weight", "0.bias"], ["0.weight", "0.bias", "2.weight", "2.bias"],
            ["x.weight", "x.bias"], ["in.weight", "in.bias"]]


def test_attributes():
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = md.ones(2, 2)
    layer.weight = nn.Parameter(md.ones(2, 2))
    layer.bias = None
    assert list(layer.state_dict()) == ["weight"]
    layer.extra = nn.ReLU()
    layer.buffer = nn.Buffer(md.zeros(1))
    assert list(layer.state_dict()) == ["weight", "buffer"]
    layer.buffer = md.ones(1)
    assert layer.state_dict()["buffer"].tolist() == [1] and "extra" in dir(layer)
    del layer.extra, layer.buffer
    assert not hasattr(layer, "extra") and list(layer.state_dict()) == ["weight"]
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        layer.wieght  # noqa: B018

    class Early(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(1, 1)

    with pytest.raises(AttributeError, match=r"super\(\).__init__"):
        Early()
    with pytest.raises(NotImplementedError, match="Module defines no forward"):
        nn.Module()(1)
    layer.weight = nn.ReLU()  # another kind of thing takes the name over
    assert list(layer.parameters()) == [] and isinstance(layer.weight, nn.ReLU)
    layer.scratch = nn.Buffer(md.zeros(1), persistent=False)
    layer.note = "x"
    del layer.note
    assert "scratch" not in layer.state_dict() and not hasattr(layer, "note")
    assert repr(nn.Parameter(md.ones(1))) == repr(torch.nn.Parameter(torch.ones(1)))
    for make_it, words in ((lambda: nn.Conv2d(3, 4, 1, groups=2), "groups=2 must divide"),
                           (lambda: nn.BatchNorm2d(3)(md.ones(2, 3)), r"4 dimensions.*\(2, 3\)"),
                           (lambda: nn.BatchNorm1d(3)(md.ones(2, 4)), r"3 channels.*\(2, 4\)"),
                           (lambda: nn.Dropout(1.5), "between 0 and 1"),
                           (lambda: nn.GELU(slope=1), "slope"), (lambda: nn.ReLU(1, 2), "takes")):
        with pytest.raises((ValueError, TypeError), match=words):
            make_it()


@pytest.mark.parametrize("hidden", [
    lambda: [nn.Linear(1, 1)], lambda: {"a": nn.Linear(1, 1)}, lambda: (nn.Linear(1, 1),),
    lambda: [nn.Parameter(md.ones(1))], lambda: [[nn.Linear(1, 1)]], lambda: {"a": [nn.ReLU()]},
])
def test_layers_in_a_plain_list_are_an_error(hidden):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = hidden()

    with pytest.raises(TypeError, match=r"Net.layers.*ModuleList"):
        Net()


def test_layers_that_come_into_a_plain_list_later_are_an_error_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = []
            self.layers.append(nn.Linear(1, 1))

    for use in (lambda net: list(net.parameters()), lambda net: net.state_dict()):
        with pytest.raises(TypeError, match=r"Net.layers.*ModuleList"):
            use(Net())


def test_modes_and_hooks():
    def facts(m):
        net, seen = tree(m), []
        net.eval()
        modes = [x.training for x in net.modules()]
        net.train()
        net.apply(lambda x: seen.append(type(x).__name__))
        net.requires_grad_(False)
        frozen = [p.requires_grad for p in net.parameters()]
        layer = m.nn.ReLU()
        before = layer.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
        after = layer.register_forward_hook(lambda module, args, out: out * 10)
        first = layer(m.tensor([2.0, 0.0])).tolist()
        before.remove(), after.remove()
        return modes, seen, frozen, first, layer(m.tensor([2.0])).tolist()

    assert facts(md) == facts(torch)


def test_casting_modules():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = net[0].weight
    net(md.ones(3, 2)).sum().backward()
    assert net.double() is net and net[0].weight is weight and weight.dtype == md.float64
    assert weight.grad.dtype == net[1].running_mean.dtype == md.float64
    assert net[1].num_batches_tracked.dtype == md.int64
    for cast, dtype in ((net.float, md.float32), (net.half, md.float16)):
        cast()
        assert weight.dtype == dtype
    assert net.to("cpu").cpu() is net and weight.dtype == md.float16
    assert net.to(md.float32)[0].weight.dtype == md.float32
    with pytest.raises(RuntimeError, match="cuda"):
        net.to("cuda")


def test_zero_grad():
    net = nn.Linear(2, 2)
    net(md.ones(1, 2)).sum().backward()
    net.zero_grad(set_to_none=False)
    assert net.weight.grad.tolist() == [[0, 0], [0, 0]]
    net.zero_grad()
    assert net.weight.grad is None


def test_loading_state():
    net, other = LeNet.build(md), LeNet.build(md)
    result = net.load_state_dict(other.state_dict())
    assert repr(result) == "<All keys matched successfully>"
    for a, b in zip(net.state_dict().values(), other.state_dict().values()):
        assert md.equal(a, b) and a.dtype == b.dtype and not np.shares_memory(a._array, b._array)
    state = dict(other.state_dict())
    weight = state.pop("head.weight")
    state["typo.weight"] = weight
    with pytest.raises(RuntimeError, match="missing: head.weight; unexpected: typo.weight"):
        net.load_state_dict(state)
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.weight"], ["typo.weight"])
    before = net.head.weight.detach().clone()
    bias = net.head.bias.detach().clone()
    state = {**other.state_dict(), "head.weight": md.ones(3, 3), "head.bias": bias + 1}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"head.weight.*\(10, 8\).*\(3, 3\)"):
            net.load_state_dict(state, strict=strict)
    assert md.equal(net.head.weight, before) and md.equal(net.head.bias, bias)  # nothing half done
    net.state_dict()["head.bias"].zero_()  # shares memory, as in PyTorch
    assert not net.head.bias.any()


def test_weights_go_both_ways():
    ours, theirs = twins(LeNet.build, md.float32)
    theirs.load_state_dict({k: torch.from_numpy(v.numpy()) for k, v in ours.state_dict().items()})
    x = normal(4, 1, 8, 8).astype(np.float32)
    close(ours.eval()(md.tensor(x)), theirs.eval()(torch.from_numpy(x)), factor=3)


def test_batches_of_no_rows():
    for make_layer, x in LAYERS:
        if x.ndim > 1 and "Flatten(start_dim=0" not in repr(make_layer(md)):
            empty = x[:0]
            for mode in (True, False):
                ours, theirs = (make_layer(m).train(mode) for m in (md, torch))
                try:
                    expected = theirs(make(torch, empty.astype(np.float32) if
                                           empty.dtype.kind == "f" else empty, False))
                except (RuntimeError, ValueError):
                    continue
                close(ours(make(md, empty.astype(np.float32) if empty.dtype.kind == "f" else empty,
                                False)), expected, repr(ours))


@pytest.mark.parametrize("name, args", [
    ("Linear", (3, 2)), ("Conv2d", (1, 2, 3)), ("ConvTranspose1d", (2, 2, 2)), ("PReLU", ()),
    ("BatchNorm2d", (3,)), ("LayerNorm", (3,)), ("GroupNorm", (1, 2)), ("Embedding", (3, 2)),
    ("LSTM", (3, 2)), ("GRUCell", (3, 2)), ("MultiheadAttention", (4, 2)),
    ("TransformerDecoderLayer", (4, 2)),
])
def test_layers_take_a_device_and_a_dtype(name, args):
    def dtypes(m):
        layer = getattr(m.nn, name)(*args, device="cpu", dtype=m.float64)
        return {key: str(value.dtype).removeprefix("torch.")
                for key, value in layer.state_dict().items()}

    assert dtypes(md) == dtypes(torch)
    with pytest.raises(RuntimeError, match="cuda"):
        getattr(nn, name)(*args, device="cuda")
