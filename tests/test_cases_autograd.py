"""Faults that tensor libraries were reported for, one test a fault and its kind.

The values are PyTorch's in float64; where minidist decides otherwise, the test says so."""
import math
import warnings

import numpy as np
import pytest

import minidist as md
import minidist.nn as nn
import minidist.nn.functional as F
from oracle import check, make, normal, positive, required, torch


def t(*values, dtype=md.float64, grad=True):
    return md.tensor(values[0] if len(values) == 1 else values, dtype=dtype, requires_grad=grad)


def near(x, expected, tolerance=1e-9):
    x = x.detach().numpy() if isinstance(x, md.Tensor) else np.asarray(x)
    assert x.shape == np.shape(expected)
    np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


def grads(function, *inputs):
    """The gradients of sum(function(*inputs))."""
    leaves = [t(x) for x in inputs]
    function(*leaves).sum().backward()
    return leaves[0].grad if len(leaves) == 1 else [x.grad for x in leaves]


@pytest.fixture
def strict_numpy():
    with np.errstate(all="raise"):
        yield


# -- graph -----------------------------------------------------------------------------------------


def test_A1_two_consumers():
    def function(x):
        y = x * 4
        return y * y + 7 * y

    near(grads(function, 1.5), 76.0)
    near(grads(function, [1.5, 0.5]), [76, 44])  # arrays are added up by a line of their own


def test_A2_every_node_once_after_its_consumers():
    near(grads(lambda a: (lambda b: (b + b) * (b + b))(a * a), 3.0), 432.0)
    # a short way and a long one to the same node, whichever comes first
    near(grads(lambda a: (lambda b: b + (b * 2 + 1) * 3)(a * a), 3.0), 42.0)
    near(grads(lambda a: (lambda b: (b * 2 + 1) * 3 + b)(a * a), 3.0), 42.0)

    def doublings(x):  # 2**200 paths
        for _ in range(200):
            x = x + x
        return x

    near(grads(doublings, 1.0) * 2.0**-200, 1.0)


def test_A3_second_backward():
    a, b = t(3.0), t(2.0)
    e = (a + b) * 4
    e.backward(retain_graph=True)
    e.backward()
    near(a.grad, 8.0)
    e = a * b
    e.backward()
    with pytest.raises(RuntimeError, match="mul a second time"):
        e.backward()


def test_A4_deep_graphs():
    x = t(1.0)
    y = x
    for _ in range(50_000):
        y = y + 1
    y.backward()
    near(y, 50_001.0)
    near(x.grad, 1.0)


def test_A6_changed_after_it_was_saved():
    a = t(2.0, 3.0)
    b = a**2
    c = b**2
    b[0] = 3
    with pytest.raises(RuntimeError, match=r"pow\w* saved its input x \(shape \(2,\)\).* version 0"
                                           r".*an assignment to a slice.* version 1.*\.clone\(\)"):
        c.sum().backward()


def test_A7_changed_through_numpy():
    x = t(1.0, 2.0, 3.0)
    y = (x * x).sum()
    x.data[0] = 100  # noticed, where torch gives [200, 4, 6]
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()
    before = x.detach().numpy(), x.detach().numpy()
    (x * x).sum()
    for array in (*before, x.detach().numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 100


def test_A9_grad_mode_after_exceptions():
    with pytest.raises(KeyError), md.no_grad():
        raise KeyError
    assert md.is_grad_enabled()
    with md.no_grad():
        with md.enable_grad():
            assert md.is_grad_enabled()
        assert not md.is_grad_enabled()
    assert md.is_grad_enabled()


def test_A10_integers_require_no_grad():
    x = t(0.1, 0.9, 0.3)
    assert x.argmax().item() == 1 and not x.argmax().requires_grad
    for y in (x.long(), x > 0.2, x == x, x.argsort(), x.max(0).indices, x.sort().indices):
        assert not y.requires_grad
    for rounded in (md.floor, md.ceil, md.round, md.sign):
        near(grads(rounded, [0.1, 0.9, 0.3]), [0, 0, 0])
    with pytest.raises(RuntimeError, match="floating point.*int64"):
        md.tensor([1, 2], requires_grad=True)


def test_A11_results_follow_their_inputs():
    x = t(1.0, 2.0, 3.0)
    y = (x * x).mean()
    assert y.requires_grad
    y.backward()
    near(x.grad, [2 / 3, 4 / 3, 2])
    # the whole kind: tests/oracle.py compares requires_grad for every op of tests/test_ops.py


# -- broadcasting ----------------------------------------------------------------------------------


def test_A12_broadcast_gradients_have_the_inputs_shape():
    a, b = grads(lambda a, b: a * b, [2.0], [[1.0, 2, 3], [4, 5, 6]])
    near(a, [21])
    near(b, np.full((2, 3), 2))


def test_A13_new_and_stretched_dimensions_at_once():
    a, b = grads(lambda a, b: a + b, [[1.0], [2], [3]], np.arange(8.0).reshape(2, 1, 4))
    near(a, [[8], [8], [8]])
    near(b, np.full((2, 1, 4), 3))


def test_A15_where_broadcasts_too():
    x, y = grads(lambda x, y: md.where(md.tensor([True, False, True]), x, y), 2.0, [10.0, 20, 30])
    near(x, 2.0)
    near(y, [0, 1, 0])


def test_A17_products_with_vectors():
    a, v = [[1.0, 2], [3, 4]], [5.0, 6]
    da, dv = grads(lambda a, v: (a @ v) * md.tensor([1.0, 10]).double(), a, v)
    near(da, [[5, 6], [50, 60]])
    near(dv, [31, 42])
    dv, da = grads(lambda v, a: (v @ a) * md.tensor([1.0, 10]).double(), v, a)
    near(dv, [21, 43])
    near(da, [[5, 50], [6, 60]])
    du, dv = grads(lambda u, v: u @ v, [1.0, 2], [5.0, 6])
    near(du, [5, 6])
    near(dv, [1, 2])


# -- singular points -------------------------------------------------------------------------------


def test_A19_ties_share_one_gradient():
    near(grads(lambda x: x.max(), [2.0, 5, 5, 1]), [0, 0.5, 0.5, 0])
    near(grads(lambda x: x.amax(), [2.0, 5, 5, 1]), [0, 0.5, 0.5, 0])
    near(grads(lambda x: x.max(0).values, [2.0, 5, 5, 1]), [0, 1, 0, 0])
    a, b = grads(md.maximum, [1.0, 2, 3], [3.0, 2, 1])
    near(a, [0, 0.5, 1])
    near(b, [1, 0.5, 0])
    near(grads(lambda x: x.min(), [5.0, 1, 1]), [0, 0.5, 0.5])


def test_A20_relu_at_zero():
    near(grads(F.relu, [-1.0, 0, 2]), [0, 0, 1])


def test_A21_clamp_at_its_bounds():
    near(grads(lambda x: md.clip(x, 0, 1), [-1.0, 0, 0.5, 1, 2]), [0, 1, 1, 1, 0])
    near(grads(F.relu6, [0.0, 3, 6]), [0, 1, 0])  # PyTorch's choice, too


def test_A22_abs_at_zero(strict_numpy):
    near(grads(abs, [-2.0, 0, 3]), [-1, 0, 1])


def test_A24_norm_at_zero(strict_numpy):
    near(grads(lambda x: x.norm(), [0.0, 0, 0]), [0, 0, 0])
    near(grads(lambda x: x.norm() ** 2, [0.0, 0]), [0, 0])
    near(grads(lambda x: x.norm(), [3.0, 4]), [0.6, 0.8])
    near(grads(lambda x: x.norm(dim=1), [[3.0, 4], [0, 0]]), [[0.6, 0.8], [0, 0]])
    near(grads(md.sqrt, [0.0, 4]), [math.inf, 0.25])
    for p in (1, 2, 3, 0.5, math.inf):
        check(lambda m, x, p=p: x.norm(p), np.zeros(3), orders=1)


def test_A26_products_with_zeros(strict_numpy):
    near(grads(lambda x: x.prod(), [4.0, 0]), [0, 4])
    near(grads(lambda x: x.prod(), [0.0, 0, 3]), [0, 0, 0])
    near(grads(lambda x: x.prod(), [2.0, 3, 4]), [12, 8, 6])
    near(grads(lambda x: x.prod(1), [[4.0, 0], [2, 3]]), [[0, 4], [3, 2]])


def test_A27_where_and_nan():
    near(grads(lambda x: md.where(x == 0, 0.0, x * md.sqrt(x)), [0.0, 4]), [math.nan, 3])

    def double_where(x):
        safe = md.where(x == 0, 1.0, x)
        return md.where(x == 0, 0.0, safe * md.sqrt(safe))

    near(grads(double_where, [0.0, 4]), [0, 3])


def test_A29_no_overflow_and_no_warnings(strict_numpy):
    x = t(1000.0, -1000, 0)
    y = F.softplus(x)
    near(y, [1000, 0, 0.6931471806], 1e-9)
    y.sum().backward()
    near(x.grad, [1, 0, 0.5])
    z = t(1000.0, -1000, 1000, -1000)
    losses = F.binary_cross_entropy_with_logits(z, md.tensor([0.0, 0, 1, 1]).double(),
                                                reduction="none")
    near(losses, [1000, 0, 0, 1000])
    losses.sum().backward()
    near(z.grad, [1, 0, 0, -1])
    near(md.sigmoid(t(1000.0, -1000)), [1, 0])
    near(grads(md.sigmoid, [1000.0, -1000]), [0, 0])


@pytest.mark.parametrize("name", "softplus silu logsigmoid gelu elu tanh sigmoid softmax "
                                 "log_softmax leaky_relu relu".split())
@pytest.mark.parametrize("dtype", [md.float32, md.float64])
def test_A29_every_activation(name, dtype):
    options = {"dim": 0} if "softmax" in name else {}
    values = [-1e30, -1e4, -100.0, -1, 0, 1, 100, 1e4]
    with warnings.catch_warnings(action="error"), np.errstate(over="raise", invalid="raise",
                                                              divide="raise"):
        x = t(values, dtype=dtype)
        y = getattr(F, name)(x, **options)
        y.sum().backward()
    reference = torch.tensor(values, dtype=getattr(torch, dtype.name), requires_grad=True)
    z = getattr(torch.nn.functional, name)(reference, **options)
    z.sum().backward()
    np.testing.assert_allclose(y.detach().numpy(), z.detach().numpy(), rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(x.grad.numpy(), reference.grad.numpy(), rtol=2e-6, atol=1e-6)


def test_A29_every_loss():
    with warnings.catch_warnings(action="error"), np.errstate(over="raise", invalid="raise",
                                                              divide="raise"):
        for dtype in (md.float32, md.float64):
            x = t([[1e4, -1e4, 0.0]], dtype=dtype)
            F.cross_entropy(x, md.tensor([1])).backward()
            near(x.grad, [[1, -1, 0]])
            md.logsumexp(t([1e4, 1e4], dtype=dtype), 0).backward()
            x = t([-1e4, 1e4], dtype=dtype)
            ones = md.ones(2, dtype=dtype)
            F.binary_cross_entropy_with_logits(x, ones, pos_weight=ones * 3).backward()
            near(x.grad, [-1.5, 0])


# -- dtypes ----------------------------------------------------------------------------------------


def test_A30_float32_stays_float32():
    x = t(1.0, 2.0, dtype=md.float32)
    y = (x * 2.0 + 1).mean()
    y.backward()
    assert y.dtype == x.grad.dtype == md.float32
    near(x.grad, [1, 1])
    total = sum([x.sum(), x.mean()])  # Python's sum starts at the integer 0
    assert total.dtype == md.float32
    x.grad = None
    (x * 1).sum().backward(md.tensor(1.0, dtype=md.float64))
    assert x.grad.dtype == md.float32
    x.grad = None
    (x * md.ones(2, dtype=md.float64)).sum().backward()  # a product in float64
    assert x.grad.dtype == md.float32
    for value in (x / 3, x**2, x**0.5, 1 / x, x.std(), x.norm(), x.sum() * np.float64(2), x.exp(),
                  F.gelu(x), F.layer_norm(x, (2,)), F.softmax(x, 0), x.logsumexp(0), x.var()):
        assert value.dtype == md.float32
        x.grad = None
        value.sum().backward()
        assert x.grad.dtype == md.float32


def test_A31_scalars_and_integers_are_weak():
    assert (md.ones(2) * np.float64(2)).dtype == md.float32
    assert (md.tensor([1, 2]) * md.tensor([0.5, 0.5])).dtype == md.float32
    assert (md.tensor([1, 2]) * np.float64(0.5)).dtype == md.float32
    x, half = md.ones(4, 2), np.float64(0.5)
    for y in (x.clamp(-half, half), x.norm(half), F.leaky_relu(x, half), F.elu(x, half),
              F.layer_norm(x, (2,), eps=half), md.full((2,), half), md.where(x > 0, x, half),
              F.batch_norm(x, None, None, training=True, eps=half), F.dropout(x, half)):
        assert y.dtype == md.float32
    for rate in np.linspace(0, 1, 3):
        assert (md.ones(2) * rate).dtype == (rate * md.ones(2)).dtype == md.float32
    p = nn.Parameter(md.ones(2))
    p.grad = md.ones(2)
    optimizer = md.optim.Adam([p], lr=np.float64(0.1))
    optimizer.step()
    assert p.dtype == md.float32


def test_A32_arrays_on_the_left():
    x = t(3.0, 4.0)
    y = np.array([1.0, 2.0]) * x
    assert isinstance(y, md.Tensor)
    near(y, [3, 8])
    y.sum().backward()
    near(x.grad, [1, 2])
    for z in (np.float64(2) * x, np.ones((2, 2)) @ x, np.ones(2) - x, np.ones(2) == x):
        assert isinstance(z, md.Tensor)


# -- indexing --------------------------------------------------------------------------------------


def test_A34_assignment_is_differentiable():
    a = t(1.0, 2.0)
    b = md.zeros(3, dtype=md.float64)
    b[1:] = a * 2
    b.sum().backward()
    near(a.grad, [2, 2])
    x = t(1.0, 2, 3)
    y = x * 1
    y[0] = 7
    y.sum().backward()
    near(x.grad, [0, 1, 1])
    for index in ((0, 0), (0,), md.tensor([0]), (slice(None), 1), md.tensor([[True, False]] * 2)):
        def assign(m, x, v, index=index):
            y, i = x * 1, index
            if isinstance(index, md.Tensor):
                i = index if m is md else torch.from_numpy(index.numpy())
            y[i] = v
            return y * x

        check(assign, (2, 2), ())


def test_A35_embeddings_accumulate_and_padding_stays():
    table = nn.Embedding(4, 1, padding_idx=0)
    assert table.weight[0].item() == 0
    table(md.tensor([0, 1, 1, 2])).sum().backward()
    near(table.weight.grad, [[0], [2], [1], [0]])


# -- losses ----------------------------------------------------------------------------------------


def test_A37_label_smoothing_and_class_weights():
    x = t([[3.0, 1, 0.2]])
    near(F.cross_entropy(x, md.tensor([0])), 0.1791041748)
    loss = F.cross_entropy(x, md.tensor([0]), label_smoothing=0.2)
    near(loss, 0.4991041748)
    loss.backward()
    near(x.grad, [[-0.0306478639, 0.0464761748, -0.0158283109]])
    x = t([[2.0, 0], [0, 3], [1, 1]])
    loss = F.cross_entropy(x, md.tensor([0, 1, 1]), md.tensor([1.0, 3.0]).double())
    near(loss, 0.3360188011)
    loss.backward()
    near(x.grad[2], [3 / 14, -3 / 14])
    # "the mean divides by the sum of the picked weights": against torch, with every option
    for smoothing in (0.0, 0.3):
        check(lambda m, x, w, s=smoothing: m.nn.functional.cross_entropy(
            x, m.tensor([0, 1, 1]), w.detach(), label_smoothing=s), (3, 2), np.array([1.0, 3.0]))


def test_A64_divergence_from_a_target_with_zeros(strict_numpy):
    x = t(math.log(0.5), math.log(0.5))
    loss = F.kl_div(x, t(0.0, 1.0, grad=False), reduction="sum")
    near(loss, 0.6931471806)
    loss.backward()
    near(x.grad, [0, -1])


def test_A60_losses_do_not_broadcast():
    for loss in (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits, nn.MSELoss()):
        with pytest.raises(ValueError, match=r"\(3, 1\).*\(3,\)"):
            loss(t([[1.0], [2], [3]]), t(1.0, 2, 3))
    near(F.mse_loss(t(1.0, 2, 3), t(1.0, 2, 3)), 0.0)


# -- normalisation ---------------------------------------------------------------------------------


def test_A38_batch_norm():
    layer = nn.BatchNorm1d(1).double()
    near(layer(t([[1.0], [3.0]])), [[-0.9999950000], [0.9999950000]])
    near(layer.running_mean, [0.2])
    near(layer.running_var, [1.1])
    near(layer.eval()(t([[1.0]])), [[0.7627666043]])
    with pytest.raises(ValueError, match="more than one value"):
        layer.train()(t([[1.0]]))
    near(layer.running_var, [1.1])


def test_A39_variance_does_not_cancel():
    x = md.tensor([40000.0, 40001, 40002, 40003])
    near(F.layer_norm(x, (4,)), [-1.3416354, -0.4472118, 0.4472118, 1.3416354], 1e-6)
    near(x.var(), 5 / 3, 1e-6)
    layer = nn.BatchNorm1d(1)
    layer(x.unsqueeze(1))
    near(layer.running_var, [0.9 + 0.1 * 5 / 3], 1e-6)


# -- convolution and pooling -----------------------------------------------------------------------


def test_A40_strides_that_leave_a_rest():
    x, w = t([[[1.0, 2, 3, 4, 5, 6]]]), t([[[1.0, 10, 100]]])
    y = F.conv1d(x, w, stride=2)
    y.sum().backward()
    near(y, [[[321, 543]]])
    near(x.grad, [[[1, 10, 101, 10, 100, 0]]])
    near(w.grad, [[[4, 6, 8]]])
    x, w = t([[[1.0, 2, 3, 4, 5, 6, 7]]]), t([[[1.0, 10]]])
    y = F.conv1d(x, w, stride=2, dilation=3, padding=1)
    y.sum().backward()
    near(y, [[[30, 52, 74]]])
    near(x.grad, [[[0, 1, 10, 1, 10, 0, 10]]])
    near(w.grad, [[[6, 15]]])


def test_A41_padding_never_wins():
    x = t([[[-1.0, -2.0]]])
    y = F.max_pool1d(x, 3, stride=1, padding=1)
    y.sum().backward()
    near(y, [[[-1, -1]]])
    near(x.grad, [[[2, 0]]])
    check(lambda m, x: m.nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
          -positive(1, 1, 5, 6))


# -- layers ----------------------------------------------------------------------------------------


def test_A43_dropout(strict_numpy):
    layer = nn.Dropout(0.5)
    near(layer.eval()(md.ones(5)), np.ones(5))
    md.manual_seed(0)
    kept = set(F.dropout(md.ones(100).double(), 0.25).tolist())
    assert len(kept) == 2 and 0 in kept and abs(max(kept) - 4 / 3) < 1e-12
    x = t(1.0, 2.0)
    y = F.dropout(x, 1.0)
    y.sum().backward()
    near(y, [0, 0])
    near(x.grad, [0, 0])


def test_A45_softmax_of_a_fully_masked_row():
    near(F.softmax(t(-math.inf, -math.inf), 0), [math.nan, math.nan])
    near(F.softmax(t(-math.inf, 1.0), 0), [0, 1])
    near(F.log_softmax(t(-math.inf, 1.0), 0), [-math.inf, 0])


@pytest.mark.parametrize("mask", [[[False, False], [True, False]],
                                  [[-math.inf, -math.inf], [0.0, -math.inf]]])
def test_A45_attention_to_nothing(mask):
    q, k, v = (t(normal(1, 1, 2, 3, seed=i)) for i in range(3))
    mask = md.tensor(mask) if mask[1][0] is True else t(mask, grad=False)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    near(out[0, 0], [[0, 0, 0], v[0, 0, 0].tolist()])
    out.sum().backward()
    for x in (q, k, v):
        assert np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("cell", [True, False])
def test_A46_gru_resets_after_the_product(cell):
    gru = (nn.GRUCell if cell else nn.GRU)(1, 1).double()
    values = [[[0.5], [0.4], [0.3]], [[0.2], [0.1], [0.6]], [0, 0, 0], [0, 0, 0.7]]
    with md.no_grad():
        for parameter, value in zip(gru.parameters(), values):
            parameter.copy_(t(value, grad=False))
    x, h = t([[1.0]]), t([[2.0]])
    out = gru(x, h) if cell else gru(x.unsqueeze(0), h.unsqueeze(0))[1][0]
    near(out, [[1.6204865204]])


def test_A47_both_forms_of_gelu():
    near(F.gelu(t(1.0, -1.0)), [0.8413447461, -0.1586552539])
    near(F.gelu(t(1.0, -1.0), approximate="tanh"), [0.8411919906, -0.1588080094])
    x = np.linspace(-6, 6, 4001)
    expected = [math.erf(v) for v in x]
    assert np.abs(md.erf(md.tensor(x)).numpy() - expected).max() == 0
    x = x.astype(np.float32)
    error = np.abs(md.erf(md.tensor(x)).numpy() - [math.erf(v) for v in x])
    assert error.max() < 5e-7


# -- optimizers ------------------------------------------------------------------------------------


def walk(make_optimizer, gradients, start=1.0):
    p, values = nn.Parameter(md.tensor(start, dtype=md.float64)), []
    optimizer = make_optimizer([p])
    for g in gradients:
        p.grad = md.tensor(g, dtype=md.float64)
        optimizer.step()
        values.append(p.item())
    return values


def test_A48_adam_corrects_its_start():
    near(walk(lambda p: md.optim.Adam(p, lr=0.1), [0.5, 0.5, -1]),
         [0.900000002, 0.800000004, 0.8075649369])
    near(walk(lambda p: md.optim.Adam(p, lr=0.1), [1e-8]), [0.95])


def test_A49_decoupled_decay():
    near(walk(lambda p: md.optim.AdamW(p, lr=0.1, weight_decay=0.1), [0.5, 0.5]),
         [0.890000002, 0.7811000040])
    near(walk(lambda p: md.optim.Adam(p, lr=0.1, weight_decay=0.1), [0.5, 0.5]),
         [0.9000000017, 0.8000473405])
    p = [nn.Parameter(md.ones(1))]
    assert md.optim.AdamW(p).defaults["weight_decay"] == 0.01
    assert md.optim.Adam(p).defaults["weight_decay"] == 0


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_A51_no_gradient_no_change(optimizer):
    p, q = nn.Parameter(md.ones(1)), nn.Parameter(md.ones(1))
    p.grad = md.zeros(1)
    this = getattr(md.optim, optimizer)([p, q], lr=0.1, weight_decay=0.5)
    this.step()
    assert p.item() != 1 and q.item() == 1 and q not in this.state
    if optimizer == "SGD":
        near(p, [0.95], 1e-6)


def test_A52_clipping_by_norm():
    def clipped(gradient, dtype=md.float64, **options):
        p = nn.Parameter(md.zeros(len(gradient), dtype=dtype))
        p.grad = md.tensor(gradient, dtype=dtype)
        total = nn.utils.clip_grad_norm_((x for x in [p]), 1.0, **options)
        return total.item(), p.grad.tolist()

    near(np.hstack(clipped([3.0, 4.0])), [5, 0.6, 0.8], 1e-6)
    assert clipped([0.3, 0.4]) == (0.5, [0.3, 0.4])
    assert clipped([0.0, 0.0]) == (0, [0, 0])
    total, g = clipped([math.inf, 1.0])
    assert total == math.inf and math.isnan(g[0]) and g[1] == 0
    total, g = clipped([1e20] * 4, md.float32)  # torch's norm overflows here, and all becomes 0
    near(g, [0.5] * 4, 1e-6)
    near(total, 2e20, 1e-6)
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        clipped([math.inf, 1.0], error_if_nonfinite=True)


# -- modules ---------------------------------------------------------------------------------------


def test_A54_shared_parameters_count_once():
    a, b = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    b.weight = a.weight
    net = nn.Sequential(a, b)
    nn.init.constant_(a.weight, 3.0)
    assert len(list(net.parameters())) == 1 and list(net.state_dict()) == ["0.weight", "1.weight"]
    optimizer = md.optim.SGD(net.parameters(), lr=0.1)
    net(md.ones(1, 1).double() * 2).sum().backward()
    near(a.weight.grad, [[12]])
    optimizer.step()
    near(a.weight, [[1.8]])


def test_A55_layers_in_plain_lists():
    class Net(nn.Module):
        def __init__(self, container):
            super().__init__()
            self.layers = container([nn.Linear(1, 1)])

    assert len(list(Net(nn.ModuleList).parameters())) == 2
    for container in (list, tuple, lambda x: dict(enumerate(x))):
        with pytest.raises(TypeError, match="Net.layers .*nn.ModuleList"):
            Net(container)


def test_A67_initial_weights_break_symmetry():
    md.manual_seed(0)
    layer = nn.Linear(64, 64)
    assert layer.weight.detach().std() > 0.05
    out = nn.Sequential(layer, nn.ReLU(), nn.Linear(64, 1))(md.randn(8, 64))
    out.sum().backward()
    assert layer.weight.grad.numpy().std(0).min() > 0


# -- data ------------------------------------------------------------------------------------------


def test_A57_memory_order_on_disk(tmp_path):
    load_file = required("safetensors.numpy").load_file
    a = np.arange(6.0).reshape(2, 3)
    arrays = {"fortran": np.asfortranarray(a), "t": a.T, "strided": a[:, ::2], "back": a[::-1],
              "big endian": a.astype(">f8"), "broadcast": np.broadcast_to(a[0], (4, 3))}
    md.save(arrays, tmp_path / "x.safetensors")
    for found in (md.load(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")):
        for name, array in arrays.items():
            np.testing.assert_array_equal(np.asarray(found[name]), array)


def test_A58_short_last_batch():
    data = md.utils.data.TensorDataset(md.arange(10))
    loader = md.utils.data.DataLoader(data, batch_size=4)
    assert [len(x) for x, in loader] == [4, 4, 2] and len(loader) == 3
    dropping = md.utils.data.DataLoader(data, batch_size=4, drop_last=True)
    assert [len(x) for x, in dropping] == [4, 4] and len(dropping) == 2


def test_A59_orders_by_seed_and_epoch():
    def epochs(seed):
        loader = md.utils.data.DataLoader(md.utils.data.TensorDataset(md.arange(8)), shuffle=True,
                                          generator=md.Generator().manual_seed(seed))
        return [[x.item() for x, in loader] for _ in range(3)]

    first = epochs(0)
    assert first[0] != first[1] != first[2] and first == epochs(0) and first != epochs(1)


# -- shapes ----------------------------------------------------------------------------------------


def test_A66_empty_and_0d():
    empty = md.zeros(0)
    assert empty.sum().item() == 0 and math.isnan(empty.mean().item()) and empty.prod().item() == 1
    for reduce in (empty.max, empty.min, empty.amax, empty.argmax, lambda: empty.max(0)):
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            reduce()
    assert md.Tensor(3.0).sum().shape == ()
    near(grads(lambda x: x - x.mean(), [1.0, 2, 3, 4]), [0, 0, 0, 0])
    x = t(3.0)
    for name in "sum mean prod max min amax norm exp".split():
        result = getattr(x, name)()
        assert result.shape == () and isinstance(result._array, np.ndarray)
    near(make(md, normal(0, 3)).sum(0), [0, 0, 0])
