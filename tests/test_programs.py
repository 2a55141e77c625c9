'''Whole programs as people write them for PyTorch, run by both: only the name imported differs.

Each program below is text that begins with its imports, of a module called TORCH. A test replaces
that name by torch and by minidist, runs both from the same weights, which travel by safetensors
under strict=True, and compares what `run` returns: losses, logits, gradients, trained weights.
'''
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minidist as md
from oracle import required, torch

required("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAMS: dict[str, str] = {}


def program(text: str) -> None:
    PROGRAMS[text.split(":")[0].strip().strip('"')] = text


def module_of(name: str, library: str) -> types.ModuleType:
    """The program as a module, with TORCH read as the library's name."""
    module = types.ModuleType(f"{name}_{library}")
    source = PROGRAMS[name].replace("TORCH", library)
    sys.modules[module.__name__] = module
    exec(compile(source, f"<{name} on {library}>", "exec"), module.__dict__)
    return module


def plain(x: Any) -> Any:
    if isinstance(x, (torch.Tensor, md.Tensor)):
        return x.detach().numpy()
    return np.asarray(x)


def both(name: str, folder: Path) -> tuple[dict, dict]:
    """Run the program in both frameworks, from torch's weights and back again."""
    theirs, ours = module_of(name, "torch"), module_of(name, "minidist")
    torch.manual_seed(0)
    models = theirs.make()
    copies = ours.make()
    for k, (model, mine) in enumerate(zip(models, copies)):
        path = folder / f"{name}-{k}.safetensors"
        state = {n: t.clone() for n, t in model.state_dict().items()}  # tied weights, apart
        save_file(state, path)
        assert repr(mine) == repr(model)
        mine.load_state_dict(md.load(path), strict=True)
        md.save(mine.state_dict(), path)
        model.load_state_dict(load_file(path), strict=True)
    return theirs.run(*models), ours.run(*copies)


def names() -> list[str]:
    return list(PROGRAMS)


program('''"GPT: training steps with weight-decay groups, generation with top-k"
import inspect
import math
from dataclasses import dataclass

import TORCH
import TORCH.nn as nn
from TORCH.nn import functional as F


@dataclass
class Config:
    block_size: int = 16
    vocab_size: int = 23
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0
    bias: bool = True


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(TORCH.ones(ndim))
        self.bias = nn.Parameter(TORCH.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout
        self.flash = hasattr(F, "scaled_dot_product_attention") and config.n_layer > 2
        self.register_buffer("bias", TORCH.tril(TORCH.ones(config.block_size, config.block_size))
                             .view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None,
                                               dropout_p=self.dropout if self.training else 0,
                                               is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                TORCH.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def get_num_params(self, non_embedding=True):
        n_params = sum(p.numel() for p in self.parameters())
        return n_params - self.transformer.wpe.weight.numel() if non_embedding else n_params

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            TORCH.nn.init.normal_(module.weight, mean=0.0, std=0.2)
            if module.bias is not None:
                TORCH.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            TORCH.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx, targets=None):
        device = idx.device
        b, t = idx.size()
        assert t <= self.config.block_size, f"cannot forward sequence of length {t}"
        pos = TORCH.arange(0, t, dtype=TORCH.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1),
                                   ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        optim_groups = [{"params": decay_params, "weight_decay": weight_decay},
                        {"params": nodecay_params, "weight_decay": 0.0}]
        fused_available = "fused" in inspect.signature(TORCH.optim.AdamW).parameters
        extra = dict(fused=False) if fused_available else dict()
        return TORCH.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra)

    @TORCH.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= self.config.block_size else \\
                idx[:, -self.config.block_size:]
            logits, _ = self(idx_cond)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = TORCH.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float("Inf")
            probs = F.softmax(logits, dim=-1)
            idx_next = TORCH.multinomial(probs, num_samples=1)
            idx = TORCH.cat((idx, idx_next), dim=1)
        return idx


def make():
    return [GPT(Config()), GPT(Config(n_layer=3, bias=False))]


def run(*models):
    found = {}
    for k, model in enumerate(models):
        data = TORCH.tensor([(7 * i * i + 3 * i) % 23 for i in range(200)], dtype=TORCH.long)
        optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
        losses = []
        for it in range(6):
            lr = 1e-2 * (it + 1) / 4 if it < 3 else 0.5 * (1 + math.cos(math.pi * it / 6)) * 1e-2
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr
            for micro_step in range(2):
                ix = [5 * it + 30 * micro_step, 100 + it]
                x = TORCH.stack([data[i:i + 16] for i in ix])
                y = TORCH.stack([data[i + 1:i + 17] for i in ix])
                logits, loss = model(x, y)
                loss = loss / 2
                loss.backward()
                losses.append(loss.item())
            norm = TORCH.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if it == 5:
                found |= {f"grad {k} {n}": p.grad for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.eval()
        start = TORCH.zeros((1, 1), dtype=TORCH.long)
        text = model.generate(start, 20, temperature=0.8, top_k=1)
        assert model.generate(start, 5, top_k=5).shape == (1, 6)
        found |= {f"losses {k}": losses, f"norm {k}": norm, f"text {k}": text[0].tolist(),
                  f"logits {k}": model(data[None, :16])[0], f"size {k}": model.get_num_params()}
    return found
''')


program('''"convnet: the MNIST example, a script with flags"
import argparse

import TORCH
import TORCH.nn as nn
import TORCH.nn.functional as F
import TORCH.optim as optim
from TORCH.optim.lr_scheduler import StepLR
from TORCH.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = TORCH.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        output = F.log_softmax(x, dim=1)
        return output


def train(args, model, device, train_loader, optimizer, epoch, losses):
    model.train()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.eval()  # so that two libraries agree
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if batch_idx % args.log_interval == 0:
            print("Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}".format(
                epoch, batch_idx * len(data), len(train_loader.dataset),
                100. * batch_idx / len(train_loader), loss.item()))
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with TORCH.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print("\\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\\n".format(
        test_loss, correct, len(test_loader.dataset), 100. * correct / len(test_loader.dataset)))
    return test_loss, correct


def main(model, argv):
    parser = argparse.ArgumentParser(description="MNIST Example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--test-batch-size", type=int, default=1000, metavar="N")
    parser.add_argument("--epochs", type=int, default=14, metavar="N")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--no-cuda", action="store_true", default=False)
    parser.add_argument("--dry-run", action="store_true", default=False)
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    parser.add_argument("--save-model", action="store_true", default=False)
    args = parser.parse_args(argv)
    use_cuda = not args.no_cuda and TORCH.cuda.is_available()
    TORCH.manual_seed(args.seed)
    if use_cuda:
        device = TORCH.device("cuda")
    else:
        device = TORCH.device("cpu")
    train_kwargs = {"batch_size": args.batch_size}
    test_kwargs = {"batch_size": args.test_batch_size}
    if use_cuda:
        cuda_kwargs = {"num_workers": 1, "pin_memory": True, "shuffle": True}
        train_kwargs.update(cuda_kwargs)
        test_kwargs.update(cuda_kwargs)
    count = TORCH.arange(96 * 144).float()
    images = TORCH.sin(count * count * 0.37).view(96, 1, 12, 12)
    labels = TORCH.arange(96) % 10
    images = images + labels.float().view(-1, 1, 1, 1) * 0.1
    train_loader = DataLoader(TensorDataset(images[:64], labels[:64]), **train_kwargs)
    test_loader = DataLoader(TensorDataset(images[64:], labels[64:]), **test_kwargs)
    model = model.to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, losses)
        results = test(model, device, test_loader)
        scheduler.step()
    return {"losses": losses, "test": results, "lr": optimizer.param_groups[0]["lr"],
            **dict(model.named_parameters())}


def make():
    return [Net()]


def run(model):
    return main(model, ["--epochs", "2", "--batch-size", "16", "--lr", "0.3"])
''')


program('''"VAE: a variational autoencoder"
import TORCH
from TORCH import nn, optim
from TORCH.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 5)
        self.fc22 = nn.Linear(40, 5)
        self.fc3 = nn.Linear(5, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = TORCH.exp(0.5 * logvar)
        eps = TORCH.randn_like(std)
        eps = TORCH.cos(TORCH.arange(std.numel()).to(std)).view_as(eps)  # the same in both
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return TORCH.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * TORCH.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def make():
    return [VAE()]


def run(model):
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    images = (TORCH.sin(TORCH.arange(48 * 64).float() * 1.7) * 0.5 + 0.5).view(48, 1, 8, 8)
    model.train()
    train_loss, losses = 0, []
    for epoch in range(2):
        for data in images.split(16):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            losses.append(loss.item() / len(data))
            optimizer.step()
    model.eval()
    with TORCH.no_grad():
        recon_batch, mu, logvar = model(images[:4])
        sample = model.decode(TORCH.ones(3, 5)).cpu().view(3, 1, 8, 8)
        comparison = TORCH.cat([images[:4], recon_batch.view(4, 1, 8, 8)[:4]])
    normal = TORCH.distributions.Normal(mu, (0.5 * logvar).exp())
    return {"losses": losses, "sample": sample, "comparison": comparison, "sum": train_loss / 100,
            "log": normal.log_prob(mu + 0.3).sum(), "entropy": normal.entropy(),
            **dict(model.named_parameters())}
''')


program('''"DCGAN: generator against discriminator"
import TORCH
import TORCH.nn as nn
import TORCH.optim as optim

nz, ngf, ndf, nc = 6, 4, 4, 1


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        TORCH.nn.init.normal_(m.weight, 0.0, 0.2)
    elif classname.find("BatchNorm") != -1:
        TORCH.nn.init.normal_(m.weight, 1.0, 0.02)
        TORCH.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        output = self.main(input)
        return output.view(-1, 1).squeeze(1)


def make():
    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    return [netG, netD]


def run(netG, netD):
    device = TORCH.device("cpu")
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    found = {"errors": []}
    for step in range(4):
        real = TORCH.sin(TORCH.arange(5 * 256).float() * (0.3 + step)).view(5, 1, 16, 16)
        netD.zero_grad()
        label = TORCH.full((real.size(0),), 1.0, dtype=real.dtype, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        noise = TORCH.cos(TORCH.arange(5 * nz).float() * (1 + step)).view(5, nz, 1, 1)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        found["errors"] += [errD_real.item() + errD_fake.item(), errG.item(),
                            output.mean().item()]
    found |= {f"D {n}": p.grad for n, p in netD.named_parameters()}
    found |= {f"G {n}": b for n, b in netG.named_buffers()}
    netG.eval()
    return found | {"fake": netG(noise)}
''')


program('''"language models: words by RNN, LSTM, GRU and Transformer"
import math

import TORCH
import TORCH.nn as nn
import TORCH.nn.functional as F


class RNNModel(nn.Module):
    """Container module with an encoder, a recurrent module, and a decoder."""

    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.0, tie_weights=False):
        super(RNNModel, self).__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        if rnn_type in ["LSTM", "GRU"]:
            self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        else:
            nonlinearity = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}[rnn_type]
            self.rnn = nn.RNN(ninp, nhid, nlayers, nonlinearity=nonlinearity, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.rnn_type, self.nhid, self.nlayers = rnn_type, nhid, nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        decoded = decoded.view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (weight.new_zeros(self.nlayers, bsz, self.nhid),
                    weight.new_zeros(self.nlayers, bsz, self.nhid))
        return weight.new_zeros(self.nlayers, bsz, self.nhid)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.0, max_len=50):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = TORCH.zeros(max_len, d_model)
        position = TORCH.arange(0, max_len, dtype=TORCH.float).unsqueeze(1)
        div_term = TORCH.exp(TORCH.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = TORCH.sin(position * div_term)
        pe[:, 1::2] = TORCH.cos(position * div_term)
        pe = pe.unsqueeze(0).transpose(0, 1)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:x.size(0), :]
        return self.dropout(x)


class TransformerModel(nn.Module):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.0):
        super().__init__()
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        layer = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout)
        self.encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.decoder = nn.Linear(ninp, ntoken)

    def _generate_square_subsequent_mask(self, sz):
        return TORCH.log(TORCH.tril(TORCH.ones(sz, sz)))

    def forward(self, src, has_mask=True):
        if has_mask:
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = self._generate_square_subsequent_mask(len(src)).to(src.device)
        else:
            self.src_mask = None
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return F.log_softmax(output, dim=-1)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


def get_batch(source, i, bptt=7):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i:i + seq_len], source[i + 1:i + 1 + seq_len].view(-1)


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, TORCH.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def make():
    models = [RNNModel(kind, 13, 8, 8, 2, tie_weights=kind == "LSTM")
              for kind in ("RNN_TANH", "RNN_RELU", "LSTM", "GRU")]
    return [*models, TransformerModel(13, 8, 2, 12, 2)]


def run(*models):
    data = batchify(TORCH.tensor([(3 * i * i + i) % 13 for i in range(125)]), 4)
    criterion, found = nn.NLLLoss(), {}
    for k, model in enumerate(models):
        model.train()
        lr, losses = 0.5, []
        hidden = None if isinstance(model, TransformerModel) else model.init_hidden(4)
        for i in range(0, data.size(0) - 1, 7):
            inputs, targets = get_batch(data, i)
            model.zero_grad()
            if hidden is None:
                output = model(inputs).view(-1, 13)
            else:
                hidden = repackage_hidden(hidden)
                output, hidden = model(inputs, hidden)
            loss = criterion(output, targets)
            loss.backward()
            TORCH.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            losses.append(loss.item())
        found |= {f"losses {k}": losses, f"ppl {k}": math.exp(losses[-1]), f"logits {k}": output}
        found |= {f"grad {k} {n}": p.grad for n, p in model.named_parameters()}
    return found
''')


program('''"characters: an RNN from cells, names to languages"
import TORCH
import TORCH.nn as nn


class CharRNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.i2o = nn.Linear(input_size + hidden_size, output_size)
        self.gru = nn.GRUCell(input_size, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, batch_first=True, bidirectional=True)
        self.o2o = nn.Linear(2 * hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, input, hidden):
        combined = TORCH.cat((input, hidden), 1)
        hidden = TORCH.tanh(self.i2h(combined)) + self.gru(input, hidden)
        seq, (h, c) = self.lstm(TORCH.stack([hidden, hidden * 0.5], dim=1))
        return self.softmax(self.o2o(seq[:, -1]) + self.i2o(combined)), hidden

    def initHidden(self):
        return TORCH.zeros(1, self.hidden_size)


letters = "abcdefghij"


def line_to_tensor(line):
    tensor = TORCH.zeros(len(line), 1, len(letters))
    for li, letter in enumerate(line):
        tensor[li][0][letters.find(letter)] = 1
    return tensor


def make():
    return [CharRNN(len(letters), 6, 3)]


def run(rnn):
    criterion, learning_rate, losses, guesses = nn.NLLLoss(), 0.05, [], []
    for epoch in range(3):
        for category, line in enumerate(["abacus", "feed", "jihad"]):
            category_tensor = TORCH.tensor([category], dtype=TORCH.long)
            line_tensor = line_to_tensor(line)
            hidden = rnn.initHidden()
            rnn.zero_grad()
            for i in range(line_tensor.size()[0]):
                output, hidden = rnn(line_tensor[i], hidden)
            loss = criterion(output, category_tensor)
            loss.backward()
            for p in rnn.parameters():
                p.data.add_(p.grad.data, alpha=-learning_rate)
            top_n, top_i = output.data.topk(1)
            guesses.append(top_i[0][0].item())
            losses.append(loss.item())
    return {"losses": losses, "guesses": guesses, **dict(rnn.named_parameters())}
''')


program('''"siamese: two images through one network, contrastive and triplet losses"
import TORCH
import TORCH.nn as nn
import TORCH.nn.functional as F
from TORCH.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        a = TORCH.sin(TORCH.arange(256).float() * (index % 3 + 1)).view(1, 16, 16)
        b = TORCH.sin(TORCH.arange(256).float() * (index % 2 + 1) + 0.1).view(1, 16, 16)
        return a, b, TORCH.tensor(float(index % 3 == index % 2), dtype=TORCH.float)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(4, 8, 3, padding="same"), nn.PReLU(8),
            nn.AdaptiveAvgPool2d((2, 2)))
        self.fc = nn.Sequential(nn.Linear(8 * 2 * 2 * 2, 16), nn.ReLU(inplace=True),
                                nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            TORCH.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.features(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        one, two = self.forward_once(input1), self.forward_once(input2)
        return self.sigmoid(self.fc(TORCH.cat((one, two), 1))), one, two


def make():
    return [SiameseNetwork()]


def run(model):
    loader = DataLoader(Pairs(), batch_size=5, shuffle=False, num_workers=0)
    optimizer = TORCH.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
    criterion, triplet, losses = nn.BCELoss(), nn.TripletMarginLoss(margin=0.5), []
    model.train()
    for epoch in range(2):
        for batch_idx, (a, b, targets) in enumerate(loader):
            optimizer.zero_grad()
            outputs, one, two = model(a, b)
            outputs = outputs.squeeze(-1)
            loss = criterion(outputs, targets)
            distance = F.pairwise_distance(one, two)
            loss = loss + 0.1 * (targets * distance.pow(2) + (1 - targets)
                                 * TORCH.clamp(1.0 - distance, min=0.0).pow(2)).mean()
            loss = loss + triplet(one, two, one.flip(0)) + F.cosine_similarity(one, two).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    correct = TORCH.where(outputs > 0.5, 1, 0).eq(targets.view_as(outputs)).sum().item()
    return {"losses": losses, "correct": correct, **dict(model.named_parameters()),
            **dict(model.named_buffers())}
''')


program('''"vision transformer: patches, class token, position embeddings"
import TORCH
import TORCH.nn as nn
import TORCH.nn.functional as F


class PatchEmbedding(nn.Module):
    def __init__(self, size, patch, channels, width):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(TORCH.zeros(1, 1, width))
        self.positions = nn.Parameter(TORCH.randn(1, (size // patch) ** 2 + 1, width) * 0.02)

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        return TORCH.cat([cls, x], dim=1) + self.positions


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, width * 3, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = TORCH.einsum("bhid,bhjd->bhij", q, k) * self.scale
        x = TORCH.einsum("bhij,bhjd->bhid", weights.softmax(dim=-1), v)
        return self.out(x.permute(0, 2, 1, 3).reshape(b, n, c))


class ViT(nn.Module):
    def __init__(self, size=12, patch=4, channels=3, width=16, depth=2, heads=4, classes=5):
        super().__init__()
        self.embed = PatchEmbedding(size, patch, channels, width)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([
                nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width),
                nn.Sequential(nn.Linear(width, 32), nn.GELU(approximate="tanh"), nn.Dropout(0.0),
                              nn.Linear(32, width))]))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 24, dropout=0.0, activation="gelu",
                                       batch_first=True, norm_first=True), 1,
            enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.embed(x)
        for norm1, attn, norm2, mlp in self.layers:
            x = attn(norm1(x)) + x
            x = mlp(norm2(x)) + x
        return self.head(self.norm(self.encoder(x))[:, 0])


def make():
    return [ViT()]


def run(model):
    images = TORCH.sin(TORCH.arange(6 * 3 * 144).float()).view(6, 3, 12, 12)
    labels = TORCH.tensor([0, 1, 2, 3, 4, 0])
    optimizer = TORCH.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = TORCH.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=5)
    criterion, losses = nn.CrossEntropyLoss(label_smoothing=0.1), []
    for step in range(5):
        logits = model(F.interpolate(images[:, :, ::2, ::2], scale_factor=2.0, mode="bilinear"))
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = TORCH.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        if step == 0:
            found = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    top = logits.softmax(-1).topk(2, dim=-1)
    return found | {"losses": losses, "logits": logits, "norm": grad_norm,
                    "top": top.values, "lr": scheduler.get_last_lr()}
''')


program('''"sequence prediction: sines by LSTM cells, LBFGS in float64"
import TORCH
import TORCH.nn as nn
import TORCH.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super(Sequence, self).__init__()
        self.lstm1 = nn.LSTMCell(1, 7)
        self.lstm2 = nn.LSTMCell(7, 7)
        self.linear = nn.Linear(7, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = TORCH.zeros(input.size(0), 7, dtype=TORCH.double)
        c_t = TORCH.zeros(input.size(0), 7, dtype=TORCH.double)
        h_t2 = TORCH.zeros(input.size(0), 7, dtype=TORCH.double)
        c_t2 = TORCH.zeros(input.size(0), 7, dtype=TORCH.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for i in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return TORCH.cat(outputs, dim=1)


def make():
    seq = Sequence()
    seq.double()
    return [seq]


def run(seq):
    data = TORCH.sin(TORCH.arange(4 * 12, dtype=TORCH.float64).view(4, 12) / 3)
    input, target = data[1:, :-1], data[1:, 1:]
    test_input, test_target = data[:1, :-1], data[:1, 1:]
    criterion, losses = nn.MSELoss(), []
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    wolfe = optim.LBFGS(seq.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    for opt in (optimizer, optimizer, wolfe):
        def closure():
            opt.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            losses.append(loss.item())
            loss.backward()
            return loss
        opt.step(closure)
    with TORCH.no_grad():
        future = 6
        pred = seq(test_input, future=future)
        loss = criterion(pred[:, :-future], test_target)
        y = pred.detach().numpy()
    return {"losses": losses, "test": loss.item(), "y": y, **dict(seq.named_parameters())}
''')


program('''"actor-critic: policy gradients with a baseline"
from collections import namedtuple

import numpy as np
import TORCH
import TORCH.nn as nn
import TORCH.nn.functional as F
import TORCH.optim as optim
from TORCH.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Policy(nn.Module):
    def __init__(self):
        super(Policy, self).__init__()
        self.affine1 = nn.Linear(4, 32)
        self.action_head = nn.Linear(32, 2)
        self.value_head = nn.Linear(32, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        action_prob = F.softmax(self.action_head(x), dim=-1)
        state_values = self.value_head(x)
        return action_prob, state_values


class Pole:
    """A pole on a cart, roughly."""

    def reset(self, start):
        self.state = np.array([0.0, 0.1 * start, 0.02 * start, 0.0])
        return self.state

    def step(self, action):
        x, v, angle, spin = self.state
        push = 10.0 if action == 1 else -10.0
        spin_up = 9.8 * np.sin(angle) - np.cos(angle) * push
        self.state = np.array([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin,
                               spin + 0.02 * spin_up])
        return self.state, 1.0, bool(abs(angle) > 0.2)


eps = np.finfo(np.float32).eps.item()


def select_action(model, state, turn):
    state = TORCH.from_numpy(state).float()
    probs, state_value = model(state)
    m = Categorical(probs)
    action = m.sample()
    assert action.item() in (0, 1)
    action = TORCH.tensor(turn % 2)  # the same in both
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item(), m.entropy()


def finish_episode(model, optimizer):
    R = 0
    policy_losses, value_losses, returns = [], [], []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = TORCH.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, TORCH.tensor([R])))
    optimizer.zero_grad()
    loss = TORCH.stack(policy_losses).sum() + TORCH.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


def make():
    return [Policy()]


def run(model):
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    env, losses, entropies = Pole(), [], []
    for i_episode in range(3):
        state, done, t = env.reset(i_episode), False, 0
        while not done and t < 20:
            action, entropy = select_action(model, state, t // 2)
            state, reward, done = env.step(action)
            model.rewards.append(reward)
            entropies.append(entropy.item())
            t += 1
        losses.append(finish_episode(model, optimizer))
    return {"losses": losses, "entropies": entropies, **dict(model.named_parameters())}
''')


@pytest.mark.parametrize("name", names())
def test_program(name, tmp_path, capsys):
    theirs, ours = both(name, tmp_path)
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        a, b = plain(ours[key]), plain(expected)
        assert a.shape == b.shape and a.dtype == b.dtype, (key, a.dtype, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=key)


def test_names_left_out():
    """What is not there says so, and what comes nearest."""
    for path, name, nearest in (("nn", "Conv3d", "Conv2d"), ("nn.functional", "conv3d", "conv2d"),
                                ("optim", "NAdam", "Adam"), ("", "logaddexp2", "logaddexp")):
        module = importlib.import_module(f"minidist.{path}" if path else "minidist")
        with pytest.raises(AttributeError, match=f"has no '{name}'.*the nearest is '{nearest}'"):
            getattr(module, name)
