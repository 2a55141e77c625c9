"""PyTorch's own databases of ops, modules and optimizers, driven through both frameworks.

Every sample of `op_db` and `module_db` whose name minidist has is computed by both, in float32,
float64, int64 and bool: values, dtypes, shapes, who requires grad, all gradients, and in float64
the second derivatives, with respect to the inputs (which are intermediate results of a graph, not
leaves) and to the gradients that flow in. Tolerances are torch.testing's; a row of TOLERANCE says
which kernel needs another and why. A sample that is not compared stands in LEFT_OUT, with the
reason. The counts are printed at the end.
"""
import collections
import inspect
import random
import warnings
from typing import Any

import numpy as np
import pytest

import minidist as md
from oracle import TOLERANCE as DEFAULT
from oracle import check, torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
COUNTS: collections.Counter = collections.Counter()

# -- what is compared, and what is not -------------------------------------------------------------

# Names that must be there: the module's, nn.functional's and linalg's, as op_db calls them.
REQUIRED = """
    zeros ones full empty arange linspace eye zeros_like ones_like full_like empty_like rand_like
    randn_like randint_like randn randint normal bernoulli multinomial clone item to zero_ fill
    uniform contiguous float double half int long short bool
    abs add sub mul div neg pow exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tanh
    sigmoid erf sign floor ceil round trunc clamp maximum minimum where lerp eq ne lt le gt ge
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    isnan isinf isfinite isclose allclose equal floor_divide remainder fmod atan2 logaddexp
    sum mean prod var std max min amax amin argmax argmin any all logsumexp cumsum norm
    linalg.vector_norm sort argsort topk
    matmul mm bmm mv outer addmm baddbmm einsum dot
    reshape reshape_as view view_as flatten unflatten transpose permute t T mT squeeze unsqueeze
    expand expand_as broadcast_to repeat repeat_interleave tile cat stack split chunk unbind narrow
    select index_select gather scatter scatter_add masked_fill masked_select __getitem__ tril triu
    roll flip diag diagonal meshgrid hstack vstack new_zeros new_ones new_full new_empty
    __radd__ __rsub__ __rmul__ __rdiv__ __rpow__ __rmod__ __rmatmul__ __rand__ __ror__ __rxor__
    softmax log_softmax
""".split() + ["nn.functional." + name for name in """
    linear conv1d conv2d conv_transpose1d conv_transpose2d
    max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    batch_norm layer_norm group_norm instance_norm rms_norm
    embedding dropout dropout2d relu relu6 leaky_relu prelu elu selu gelu silu mish softplus
    softsign logsigmoid hardtanh glu interpolate unfold pixel_shuffle normalize pad one_hot
    cosine_similarity pairwise_distance scaled_dot_product_attention cross_entropy nll_loss
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div triplet_margin_loss
    binary_cross_entropy_with_logits
""".split()]

# Signatures in op_db that are not those of the function's users.
ADAPTED = {
    "where": lambda x, condition, y: md.where(condition, x, y),
    "einsum": lambda operands, equation: md.einsum(equation, *operands),
    "nn.functional.embedding": lambda weight, index, **options:
        md.nn.functional.embedding(index, weight, **options),
    "__rmatmul__": lambda x, y: md.Tensor.__rmatmul__(x, y),
    "__rdiv__": lambda x, y: md.Tensor.__rtruediv__(x, y),
    "fill": lambda x, value: x.clone().fill_(value),
    "uniform": lambda x, *bounds, **named: x.clone().uniform_(*bounds, **named),
    "zero_": lambda x: x.clone().zero_(),
    "normal in_place": lambda x, *args, **named: x.clone().normal_(*args, **named),
    "unfold": None,  # Tensor.unfold is another function than nn.functional.unfold
}

RANDOM = {  # compared by shape and dtype; what they draw is the business of other tests
    "bernoulli", "empty", "empty_like", "multinomial", "new_empty", "nn.functional.dropout",
    "nn.functional.dropout2d", "normal", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "uniform",
}
SORTING = {"sort", "argsort", "topk"}  # equal elements may come in any order


def mode(sample: Any) -> Any:
    return sample.kwargs.get("mode")


# (op, which samples, reason)
LEFT_OUT: list[tuple[str, Any, str]] = [
    ("nn.functional.pad", lambda s: mode(s) in ("reflect", "replicate", "circular")
     or any(a in ("reflect", "replicate", "circular") for a in s.args),
     "padding other than by a constant is not part of minidist"),
    ("nn.functional.interpolate", lambda s: mode(s) not in ("nearest", "linear", "bilinear"),
     "interpolation is nearest, linear or bilinear"),
    ("norm", lambda s: any(a == "nuc" for a in s.args), "a norm of singular values"),
    ("scatter", lambda s: "reduce" in s.kwargs, "scatter(reduce=) is deprecated: scatter_add"),
    ("gather", lambda s: s.args[1].numel() == 0,
     "an empty index of more dimensions than the tensor"),
    ("baddbmm", lambda s: not s.input.is_floating_point() and s.kwargs.get("beta", 1) % 1 != 0,
     "torch drops the fraction of factors of integers"),
    ("__rpow__", lambda s: s.input.dtype == torch.int64, "negative powers of integers"),
    ("nn.functional.scaled_dot_product_attention", lambda s: s.kwargs.get("dropout_p", 0) > 0,
     "random"),
    ("to", lambda s: any(isinstance(a, torch.memory_format) for a in s.kwargs.values()),
     "memory formats"),
    ("contiguous", lambda s: "memory_format" in s.kwargs, "memory formats"),
]

# (op, dtype): relative and absolute tolerance, and why torch.testing's own do not fit
TOLERANCES: dict[tuple[str, str], tuple[float, float, str]] = {
    ("nn.functional.layer_norm", "float32"):
        (1.3e-6, 1e-4, "the gradient of one value normalised by itself is 0; torch's is rounding"),
    ("pow", "float32"): (2e-6, 30, "gradients up to 1e8 that cancel, summed over the broadcast"),
    ("nn.functional.scaled_dot_product_attention", "float32"):
        (1e-4, 2e-4, "scores of some hundreds, whose last digits the softmax magnifies"),
    ("GRUCell", "float32"):
        (1e-5, 2e-5, "1 - sigmoid, near 1, keeps few digits of the sigmoid's rounding"),
    **{(name, "float32"):
       (1e-5, 5e-5, "gradients of weights pass two normalisations, large and of both signs")
       for name in ("TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer",
                    "Transformer")},
}


# -- the same sample for both ----------------------------------------------------------------------


def dtype_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def mapped(x: Any, change: Any) -> Any:
    """The structure x with every leaf changed."""
    if type(x) in (list, tuple):
        return type(x)(mapped(i, change) for i in x)
    if isinstance(x, dict):
        return {k: mapped(v, change) for k, v in x.items()}
    return change(x)


def to_minidist(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        array = np.array(x.detach().numpy(), order="K")
        return md.from_numpy(array).requires_grad_(x.requires_grad)
    if isinstance(x, torch.dtype):
        return np.dtype(str(x).removeprefix("torch."))
    if isinstance(x, torch.device):
        return md.device("cpu")
    return tuple(x) if isinstance(x, torch.Size) else x


def to_torch(x: Any) -> Any:
    """A copy, since samples are used more than once."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def tensors(m: Any, x: Any) -> list:
    found: list = []
    mapped(list(x) if isinstance(x, tuple) else x,
           lambda i: found.append(i) if isinstance(i, m.Tensor) else None)
    return found


def computed(m: Any, function: Any, sample: tuple, orders: int, leaves: bool = False) -> dict:
    """Values, gradients and second derivatives by name; x * 1 makes inputs that are no leaves.
    Derivatives are with respect to these, or to the leaves behind them."""
    points: list = []

    def inner(x: Any) -> Any:
        if isinstance(x, m.Tensor) and x.requires_grad:
            result = x * 1
            points.append(x if leaves else result)
            return result
        return x

    x, args, options = mapped(sample, inner)
    out = function(x, *args, **options)
    outputs = tensors(m, out) or [out]
    found = {f"value {i}": o for i, o in enumerate(outputs)}
    outputs = [o for o in outputs if getattr(o, "requires_grad", False)]
    if not outputs or not orders:
        return found
    draw = np.random.default_rng(3)

    def random_like(x: Any, grad: bool) -> Any:
        array = np.asarray(draw.standard_normal(tuple(x.shape)).astype(dtype_of(x)))
        return m.from_numpy(array).requires_grad_(grad)

    seeds = [random_like(o, True) for o in outputs]
    first = m.autograd.grad(outputs, points, seeds, create_graph=True, allow_unused=True)
    found |= {f"gradient {i}": g for i, g in enumerate(first)}
    if orders > 1:
        pairs = [(g, random_like(g, False)) for g in first if g is not None]
        pairs = [(g, w) for g, w in pairs if g.requires_grad]
        targets = [*points, *seeds]
        second = m.autograd.grad([g for g, _ in pairs], targets, [w for _, w in pairs],
                                 allow_unused=True) if pairs else [None] * len(targets)
        found |= {f"second derivative {i}": g for i, g in enumerate(second)}
    return found


def difference(ours: dict, theirs: dict, dtype: str, tolerance: Any = None,
               values: bool = True) -> str:
    """What differs, in words; nothing if all agrees."""
    for name, b in theirs.items():
        a = ours.get(name)
        if a is None or b is None:  # no gradient at all and a gradient of zeros mean the same
            if any(x is not None and np.any(x.detach().numpy()) for x in (a, b)):
                return f"{name}: {a}, torch has {b}"
            continue
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"{name}: {a!r}, torch has {b!r}"
            continue
        if not isinstance(a, md.Tensor):
            return f"{name}: {type(a).__name__}, torch has a tensor"
        for what, x, y in (("dtype", dtype_of(a), dtype_of(b)),
                           ("shape", tuple(a.shape), tuple(b.shape)),
                           ("requires_grad", a.requires_grad, b.requires_grad)):
            if x != y and (what != "requires_grad" or values and name.startswith("value")):
                return f"{name}: {what} {x}, torch has {y}"
        x, y = a.detach().numpy(), b.detach().numpy(force=True)
        rtol, atol = (tolerance or DEFAULT.get(y.dtype.name, (0, 0)))[:2]
        if values and not np.allclose(x, y, rtol, atol, equal_nan=True):
            worst = np.nanargmax(np.abs(x.astype(float) - y.astype(float)))
            return f"{name}: {x.flat[worst]!r}, torch has {y.flat[worst]!r}"
    return ""


def same_up_to_ties(x: Any, dim: int, ours: Any, theirs: Any) -> bool:
    """Whether two ways to sort or to pick the largest differ only among equal elements."""
    x = x.numpy()
    return x.ndim == 0 or np.array_equal(*(np.take_along_axis(x, i.numpy(), dim)
                                           for i in (ours, theirs)))


def words(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{dtype_of(x)}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        return "(" + ", ".join(map(words, x)) + ")"
    return "{" + ", ".join(f"{k}: {words(v)}" for k, v in x.items()) + "}" \
        if isinstance(x, dict) else repr(x)


# -- ops -------------------------------------------------------------------------------------------


def function_of(name: str) -> Any:
    """minidist's function or method of that name (which a variant may follow)."""
    if name in ADAPTED:
        return ADAPTED[name]
    name = name.partition(" ")[0]
    if name in ADAPTED:
        return ADAPTED[name]
    found: Any = md
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found) and not isinstance(found, type):
        return found
    found = inspect.getattr_static(md.Tensor, name, None)
    if isinstance(found, property):
        return found.fget
    return None if found is None else lambda x, *args, **options: getattr(x, name)(*args, **options)


OPS = [info for info in database.op_db if function_of(info.name) is not None]


def identity(info: Any) -> str:
    return info.name + (f" {info.variant_test_name}" if info.variant_test_name else "")


def samples_of(info: Any, dtype: Any, grad: bool) -> list:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return list(info.sample_inputs("cpu", dtype, requires_grad=grad))


def left_out(info: Any, sample: Any) -> str:
    for name, applies, reason in LEFT_OUT:
        if name == info.name and applies(sample):
            return reason
    return ""


def test_names():
    """What minidist promises is there, and PyTorch's database knows it."""
    known = {info.name for info in database.op_db}
    assert not [n for n in REQUIRED if n in known and function_of(n) is None]
    assert not [n for n in REQUIRED if n not in known and n not in ("dot", "softmax")]


@pytest.mark.parametrize("info", OPS, ids=identity)
def test_op(info):
    forms = [function_of(identity(info))]
    method = getattr(md.Tensor, info.name, None)
    if callable(method) and info.method_variant and not {info.name, identity(info)} & {*ADAPTED}:
        forms.append(method)
    failures: list[str] = []
    for dtype, orders in ((torch.float64, 2), (torch.float32, 1), (torch.int64, 0),
                          (torch.bool, 0)):
        if dtype not in info.dtypes:
            continue
        grad = info.supports_autograd and dtype.is_floating_point
        orders = min(orders, 2 if info.supports_gradgrad else 1) if grad else 0
        orders = 0 if info.name in RANDOM else orders
        name = str(dtype).removeprefix("torch.")
        tolerance = TOLERANCES.get((info.name, name))
        for k, sample in enumerate(samples_of(info, dtype, grad)):
            COUNTS["samples of ops"] += 1
            if reason := left_out(info, sample):
                COUNTS[f"left out: {info.name}: {reason}"] += 1
                continue
            whole = (sample.input, sample.args, sample.kwargs)
            order = orders
            try:
                theirs = computed(torch, info.op, mapped(whole, to_torch), order)
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                COUNTS[f"first derivatives only, torch has no more: {info.name}"] += 1
                theirs = computed(torch, info.op, mapped(whole, to_torch), order := 1)
            whole[2].pop("layout", None)  # strided, always
            try:
                ours = computed(md, forms[k % len(forms)], mapped(whole, to_minidist), order)
                if info.name in SORTING and "float" not in name:
                    index = list(ours)[-1]
                    dim = sample.kwargs.get("dim", (*sample.args, -1, -1)[info.name == "topk"])
                    if same_up_to_ties(sample.input, dim, ours[index], theirs[index]):
                        ours[index] = md.from_numpy(theirs[index].numpy())
                problem = difference(ours, theirs, name, tolerance, info.name not in RANDOM)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                failures.append(f"{name} {problem} <- {words(whole)}")
            else:
                COUNTS["agree"] += 1
    assert not failures, f"{len(failures)} samples:\n" + "\n".join(failures[:12])


IN_PLACE = [info for info in OPS if info.inplace_variant and hasattr(md.Tensor, info.name + "_")]


@pytest.mark.parametrize("info", IN_PLACE, ids=identity)
def test_op_in_place(info):
    """x.exp_() and the like: value, gradients, and the refusals of what cannot be held."""
    ours_, theirs_ = getattr(md.Tensor, info.name + "_"), info.inplace_variant
    failures = []
    for dtype in (torch.float64, torch.int64):
        if dtype not in info.dtypes:
            continue
        grad = info.supports_autograd and dtype.is_floating_point
        for sample in samples_of(info, dtype, grad):
            if left_out(info, sample) or not isinstance(sample.input, torch.Tensor):
                continue
            COUNTS["samples in place"] += 1
            whole = (sample.input, sample.args, sample.kwargs)
            try:
                theirs = computed(torch, theirs_, mapped(whole, to_torch), int(grad), True)
            except RuntimeError as error:
                with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
                    computed(md, ours_, mapped(whole, to_minidist), 0)
                    failures.append(f"not refused: {words(whole)}, torch says {error}")
                COUNTS["refused in place"] += 1
                continue
            try:
                ours = computed(md, ours_, mapped(whole, to_minidist), int(grad), True)
                problem = difference(ours, theirs, "float64", None, info.name not in RANDOM)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                failures.append(f"{problem} <- {words(whole)}")
    assert not failures, f"{len(failures)} samples:\n" + "\n".join(failures[:12])


# -- modules ---------------------------------------------------------------------------------------

MODULES = [info for info in module_db if hasattr(md.nn, info.module_cls.__name__)]
REQUIRED_MODULES = """
    Linear Conv1d Conv2d ConvTranspose2d MaxPool1d MaxPool2d AvgPool1d AvgPool2d AdaptiveAvgPool1d
    AdaptiveAvgPool2d BatchNorm1d BatchNorm2d LayerNorm GroupNorm InstanceNorm2d RMSNorm Embedding
    ReLU ReLU6 LeakyReLU PReLU ELU SELU GELU SiLU Mish Softplus Softsign LogSigmoid Hardtanh GLU
    Softmax LogSoftmax Tanh Sigmoid MultiheadAttention TransformerEncoderLayer TransformerEncoder
    TransformerDecoderLayer Transformer
    RNN LSTM GRU RNNCell LSTMCell GRUCell CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss
    HuberLoss BCELoss BCEWithLogitsLoss KLDivLoss InstanceNorm1d ConvTranspose1d
""".split()


def same_weights(theirs: Any, ours: Any) -> None:
    state = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    assert list(state) == list(ours.state_dict())
    ours.load_state_dict({name: md.tensor(array) for name, array in state.items()})


def module_results(m: Any, module: Any, inputs: Any) -> dict[str, Any]:
    args, options = inputs
    out = module(*args, **options)
    outputs = tensors(m, out)
    found = {f"value {i}": o for i, o in enumerate(outputs)}
    outputs = [o for o in outputs if o.requires_grad]
    leaves = [x for x in tensors(m, [list(args), options]) if x.requires_grad]
    draw = np.random.default_rng(3)
    seeds = [m.from_numpy(np.asarray(draw.standard_normal(tuple(o.shape)).astype(dtype_of(o))))
             for o in outputs]
    points = {f"input {i}": x for i, x in enumerate(leaves)} | dict(module.named_parameters())
    if outputs and points:
        first = m.autograd.grad(outputs, list(points.values()), seeds, allow_unused=True)
        found |= {f"gradient of {n}": g for n, g in zip(points, first)}
    return found | {f"buffer {n}": b for n, b in module.named_buffers()}


# (module, which inputs, reason)
MODULES_LEFT_OUT: list[tuple[str, Any, str]] = [
    ("MultiheadAttention", lambda args, options: any(
        options.get(n) for n in ("add_bias_kv", "add_zero_attn", "kdim", "vdim")),
     "add_bias_kv, add_zero_attn, kdim and vdim are not part of minidist"),
    ("LSTM", lambda args, options: options.get("proj_size"), "proj_size is not part of minidist"),
]


def built(cls: Any, args: Any, options: Any) -> Any:
    """minidist's module from what torch's constructor was given."""
    def change(x: Any) -> Any:
        if callable(x) and not isinstance(x, torch.nn.Module):
            return getattr(md.nn.functional, x.__name__)
        if not isinstance(x, torch.nn.TransformerEncoderLayer):
            return to_minidist(x)
        return md.nn.TransformerEncoderLayer(
            x.linear1.in_features, x.self_attn.num_heads, x.linear1.out_features, x.dropout.p,
            activation=x.activation.__name__, batch_first=x.self_attn.batch_first,
            norm_first=x.norm_first, layer_norm_eps=x.norm1.eps, bias=x.linear1.bias is not None)

    return cls(*mapped(args, change), **mapped(options, change))


@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.module_cls.__name__)
def test_module(info):
    """Text, names of the state, values, gradients of inputs and parameters, buffers; in training
    and in evaluation."""
    ours_class, failures = getattr(md.nn, info.module_cls.__name__), []
    for dtype, training in ((torch.float64, True), (torch.float64, False), (torch.float32, True)):
        torch.manual_seed(0)
        name = str(dtype).removeprefix("torch.")
        for sample in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True,
                                              training=training):
            if sample.forward_input is None:
                continue
            COUNTS["samples of modules"] += 1
            args, options = sample.constructor_input.args, sample.constructor_input.kwargs
            reason = next((r for n, applies, r in MODULES_LEFT_OUT
                           if n == info.module_cls.__name__ and applies(args, options)), "")
            if reason:
                COUNTS[f"left out: {info.module_cls.__name__}: {reason}"] += 1
                continue
            theirs = info.module_cls(*args, **options).to(dtype).train(training)
            inputs = (sample.forward_input.args, sample.forward_input.kwargs)
            expected = module_results(torch, theirs, mapped(inputs, to_torch))
            theirs = info.module_cls(*args, **options).to(dtype).train(training) \
                if list(theirs.buffers()) and training else theirs
            try:
                ours = built(ours_class, args, options)
                ours = ours.to(np.dtype(name)).train(training)
                same_weights(theirs, ours)
                assert repr(ours) == repr(theirs), f"{ours!r} is not {theirs!r}"
                expected = module_results(torch, theirs, mapped(inputs, to_torch))
                problem = difference(module_results(md, ours, mapped(inputs, to_minidist)),
                                     expected, name, TOLERANCES.get(
                                         (info.module_cls.__name__, name)))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                failures.append(f"{name} {problem} <- {words((args, options))} {words(inputs)}")
            else:
                COUNTS["modules agree"] += 1
    assert not failures, f"{len(failures)} samples:\n" + "\n".join(failures[:12])


def test_names_of_modules():
    assert not [n for n in REQUIRED_MODULES if n not in {i.module_cls.__name__ for i in MODULES}]


# Modules that the database does not have: (constructor, shapes of inputs)
FURTHER = {
    "Unfold": (lambda nn: nn.Unfold((2, 3), padding=1, stride=2), (2, 3, 5, 6)),
    "Upsample": (lambda nn: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 5)),
    "Upsample size": (lambda nn: nn.Upsample(7), (2, 3, 4)),
    "PixelShuffle": (lambda nn: nn.PixelShuffle(2), (2, 8, 3, 2)),
    "Unflatten": (lambda nn: nn.Unflatten(1, (2, 3)), (4, 6)),
    "Flatten": (lambda nn: nn.Flatten(), (2, 3, 4)),
    "Identity": (lambda nn: nn.Identity(3, x=2), (2, 3)),
    "Dropout2d": (lambda nn: nn.Dropout2d(0.3).eval(), (2, 3, 4, 4)),
    "Dropout": (lambda nn: nn.Dropout(0.3).eval(), (2, 3)),
    "CosineSimilarity": (lambda nn: nn.CosineSimilarity(dim=0), (3, 4), (3, 4)),
    "PairwiseDistance": (lambda nn: nn.PairwiseDistance(p=1, keepdim=True), (3, 4), (3, 4)),
    "TripletMarginLoss": (lambda nn: nn.TripletMarginLoss(0.5, swap=True), (3, 4), (3, 4), (3, 4)),
    "Sequential": (lambda nn: nn.Sequential(nn.ReLU(True), nn.Sequential(nn.ELU(), nn.SELU()),
                                            nn.Tanh()), (3, 4)),
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_module(name):
    make, *shapes = FURTHER[name]
    assert repr(make(md.nn)) == repr(make(torch.nn))
    check(lambda m, *xs: make(m.nn)(*[x * 1 for x in xs]), *shapes)


def test_containers_print_alike():
    def build(nn: Any) -> Any:
        return nn.ModuleDict({
            "layers": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)] + [nn.ReLU()] * 2
                                    + [nn.LSTM(2, 3, 2, bidirectional=True, dropout=0.1)]),
            "empty": nn.ModuleList(), "heads": nn.Sequential(nn.Conv1d(1, 2, 3, padding="same")),
            "attention": nn.MultiheadAttention(4, 2), "table": nn.Embedding(3, 4, padding_idx=1)})

    assert repr(build(md.nn)) == repr(build(torch.nn))
    scales = [nn.ParameterList([nn.Parameter(m.zeros(2, 3)), nn.Parameter(m.ones(4))])
              for m, nn in ((md, md.nn), (torch, torch.nn))]
    assert repr(scales[0]) == repr(scales[1])


# -- optimizers and schedules ----------------------------------------------------------------------

OPTIMIZERS = [info for info in optim_db if hasattr(md.optim, info.optim_cls.__name__)]


def small_problem(m: Any, dtype: str) -> tuple[Any, Any]:
    """A layer and a loss that its parameters matter to, with the same numbers in both."""
    draw = np.random.default_rng(0)
    w, b, x, y = (m.from_numpy(draw.standard_normal(s).astype(dtype)) for s in
                  ((3, 4), (3,), (8, 4), (8, 3)))
    params = [m.nn.Parameter(w), m.nn.Parameter(b)]
    return params, lambda: ((m.tanh(x @ params[0].T) * 2 + params[1] - y) ** 2).mean()


def optimized(m: Any, make: Any, dtype: str, steps: int = 12) -> list:
    params, loss = small_problem(m, dtype)
    optimizer = make(params)
    path = []

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for k in range(steps):
        if k == steps // 2:  # as from a checkpoint
            state = optimizer.state_dict()
            optimizer = make(params)
            optimizer.load_state_dict(state)
        optimizer.step(closure)
        path += [p.detach().numpy().copy() for p in params]
    return path


def maker(cls: Any, options: dict, grouped: bool) -> Any:
    return lambda params: cls(params, **options) if not grouped else cls(
        [{"params": params[:1], **options}, {"params": params[1:]}])


@pytest.mark.parametrize("info", OPTIMIZERS, ids=lambda info: info.optim_cls.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_optimizer(info, dtype):
    """Every set of options of optim_db, also as a parameter group's: the path of the parameters."""
    ours, theirs = getattr(md.optim, info.optim_cls.__name__), info.optim_cls
    for sample in info.optim_inputs_func("cpu", torch.float32):
        options = sample.kwargs
        # LBFGS has one group; torch's Adagrad takes its start from the constructor alone.
        single = info.optim_cls is torch.optim.LBFGS or "initial_accumulator_value" in options
        for grouped in (False,) if single else (False, True):
            COUNTS["options of optimizers"] += 1
            expected = optimized(torch, maker(theirs, options, grouped), dtype)
            found = optimized(md, maker(ours, mapped(options, to_minidist), grouped), dtype)
            # In float32 LBFGS stops where the last digit of the loss stands still: by chance.
            factor = 30 if info.optim_cls is torch.optim.LBFGS and dtype == "float32" else 1
            for k, (a, b) in enumerate(zip(found, expected)):
                rtol, atol = (t * factor for t in DEFAULT[dtype])
                np.testing.assert_allclose(a, b, rtol, atol, err_msg=f"{options}, {k}")


SCHEDULES = {
    "LambdaLR": lambda s, o: s.LambdaLR(o, [lambda k: 0.95**k, lambda k: 1 / (1 + k)]),
    "StepLR": lambda s, o: s.StepLR(o, 7, gamma=0.5),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [3, 50, 50, 120], gamma=0.3),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.97),
    "LinearLR": lambda s, o: s.LinearLR(o, start_factor=0.2, end_factor=0.9, total_iters=33),
    "LinearLR defaults": lambda s, o: s.LinearLR(o),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 30, eta_min=0.01),
    "CosineAnnealingLR once": lambda s, o: s.CosineAnnealingLR(o, T_max=200),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 9, 2, 0.001),
    "CosineAnnealingWarmRestarts even": lambda s, o: s.CosineAnnealingWarmRestarts(o, T_0=25),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, 0.5, total_steps=201),
    "OneCycleLR linear": lambda s, o: s.OneCycleLR(o, [0.5, 0.2], epochs=21, steps_per_epoch=10,
                                                   anneal_strategy="linear", pct_start=0.2),
    "OneCycleLR phases": lambda s, o: s.OneCycleLR(o, max_lr=0.5, total_steps=250, three_phase=True,
                                                   cycle_momentum=False),
    "SequentialLR": lambda s, o: s.SequentialLR(o, [
        s.LinearLR(o, 0.1, total_iters=10), s.CosineAnnealingLR(o, 90), s.ExponentialLR(o, 0.9)],
        milestones=[10, 100]),
    "ReduceLROnPlateau": lambda s, o: s.ReduceLROnPlateau(o, factor=0.5, patience=4),
    "ReduceLROnPlateau max": lambda s, o: s.ReduceLROnPlateau(
        o, "max", 0.7, 3, threshold=0.01, threshold_mode="abs", cooldown=5, min_lr=[0.001, 0.01]),
}


def rates(m: Any, schedule: str, cut: int | None) -> list:
    """Rates and momenta of 200 steps; at `cut` the schedule is saved and loaded into another."""
    def make() -> tuple[Any, Any]:
        a, b = (m.nn.Parameter(m.zeros(2)) for _ in range(2))
        optimizer = m.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.05}], lr=0.1,
                                momentum=0.9)
        return optimizer, SCHEDULES[schedule](m.optim.lr_scheduler, optimizer)

    optimizer, scheduler = make()
    metrics = np.random.default_rng(1).standard_normal(200).cumsum()
    path = []
    for k in range(200):
        path.append([(g["lr"], g["momentum"]) for g in optimizer.param_groups])
        if k == cut:
            states = optimizer.state_dict(), scheduler.state_dict()
            optimizer, scheduler = make()
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        optimizer.step()
        scheduler.step(*[metrics[k]] * ("Plateau" in schedule))
        assert [g["lr"] for g in optimizer.param_groups] == list(scheduler.get_last_lr())
    return path


@pytest.mark.parametrize("cut", [None, 60])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(schedule, cut):
    np.testing.assert_allclose(rates(md, schedule, cut), rates(torch, schedule, None),
                               rtol=1e-9, atol=1e-12)
    COUNTS["schedules"] += 1


def test_names_of_optimizers():
    names = {info.optim_cls.__name__ for info in OPTIMIZERS}
    assert set("SGD Adam AdamW Adagrad Adadelta RMSprop LBFGS".split()) <= names


# -- second derivatives by differences -------------------------------------------------------------

DIFFERENTIABLE = list({info.name: info for info in OPS if info.supports_autograd and torch.float64
                       in info.dtypes and info.name not in {*RANDOM, "float", "half"}}.values())


@pytest.mark.parametrize("info", DIFFERENTIABLE, ids=identity)
def test_gradgradcheck(info):
    """Both orders against difference quotients on the smallest sample: minidist alone, so that
    nothing rests on what torch records. Inputs are intermediate results (x * 1) of the leaves."""
    function = function_of(info.name)

    def size(sample: Any) -> tuple:
        found = tensors(torch, [sample.input, list(sample.args), sample.kwargs])
        total = sum(x.numel() for x in found if x.requires_grad)
        return (total == 0, total)

    samples = [s for s in samples_of(info, torch.float64, True) if not left_out(info, s)
               and size(s)[1] > 0]
    if not samples:
        return
    sample = min(samples, key=size)
    whole = mapped((sample.input, sample.args, sample.kwargs), to_minidist)
    leaves = [x for x in tensors(md, list(whole)) if x.requires_grad]

    def composed(*points: Any) -> Any:
        given = dict(zip(map(id, leaves), points))
        x, args, options = mapped(whole, lambda i: given[id(i)] * 1 if id(i) in given else i)
        out = function(x, *args, **options)
        return tuple(o for o in tensors(md, out) if o.is_floating_point())

    assert md.autograd.gradcheck(composed, leaves, atol=1e-4)
    assert md.autograd.gradgradcheck(composed, leaves, atol=1e-3)
    COUNTS["gradgradcheck"] += 1


def test_counts(record_property):
    """Says at the end of the run what was compared (tests/conftest.py prints it)."""
    record_property("report", "\n".join(f"{n:7,} {what}" for what, n in sorted(COUNTS.items())))
