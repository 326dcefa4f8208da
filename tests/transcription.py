"""The paper's equations, written slowly: float64, one coordinate at a time, plain loops, no autograd."""

import math

import torch


def softmax(row):
    top = max(row)
    exp = [math.exp(a - top) for a in row]
    return [a / sum(exp) for a in exp]


def entropy(row):
    """Of the softmax of a row of logits."""
    return -sum(p * math.log(p) for p in softmax(row) if p > 0)


def layer_norm(u, gain, bias, eps=1e-6):
    mean = sum(u) / len(u)
    var = sum((a - mean) ** 2 for a in u) / len(u)
    return [(a - mean) / math.sqrt(var + eps) * g + b for a, g, b in zip(u, gain, bias, strict=True)]


def times(x, W):
    """Row vector times matrix."""
    return [sum(x[i] * W[i][j] for i in range(len(x))) for j in range(len(W[0]))]


def project(weight, z):
    """torch's Linear: weight (d, 2)."""
    return [sum(w * a for w, a in zip(row, z, strict=True)) for row in weight]


def f(x, W, b, gain, bias):
    u = [a + c for a, c in zip(times(x, W), b, strict=True)]
    return [a + n for a, n in zip(x, layer_norm(u, gain, bias), strict=True)]


def memory_loss(k, v, W, b, gain, bias):
    """Eq. 3 with the factor 1/2 of the released system."""
    return 0.5 * sum((a - c) ** 2 for a, c in zip(f(k, W, b, gain, bias), v, strict=True))


def phi_of(generator):
    """The generator's weights as nested lists, by the paper's symbols."""
    state = {name: t.double().tolist() for name, t in generator.state_dict().items()}
    return {
        "Q": state["q_proj.weight"],
        "K": state["memory.k_proj.weight"],
        "V": state["memory.v_proj.weight"],
        "O": state["o_proj.weight"][0],
        "gain": state["memory.norm.weight"],
        "bias": state["memory.norm.bias"],
        "post_gain": state["post_norm.weight"],
        "post_bias": state["post_norm.bias"],
        "W0": state["memory.W"],
        "b0": state["memory.b"],
        "w_lr": state["memory.lr_weight"],
        "b_lr": state["memory.lr_bias"],
        "tau": state["memory.lr_scale"],
    }


def memorise(z, W, b, phi):
    """Eqs. 3-5: one gradient step on (W, b); the gradient of Eq. 3 comes from torch.autograd on the scalar loss."""
    d = len(b)
    k, v = project(phi["K"], z), project(phi["V"], z)
    Wt = torch.tensor(W, dtype=torch.float64, requires_grad=True)
    bt = torch.tensor(b, dtype=torch.float64, requires_grad=True)
    kt, vt = torch.tensor(k, dtype=torch.float64), torch.tensor(v, dtype=torch.float64)
    gain, bias = (torch.tensor(phi[name], dtype=torch.float64) for name in ("gain", "bias"))
    u = kt @ Wt + bt
    normed = (u - u.mean()) / (u.var(correction=0) + 1e-6).sqrt() * gain + bias
    loss = 0.5 * (kt + normed - vt).square().sum()
    loss.backward()
    rate = sum(w * a for w, a in zip(phi["w_lr"], z, strict=True)) + phi["b_lr"]
    eta = max(0.0, 1 + phi["tau"]) / (1 + math.exp(-rate)) / d
    return (Wt - eta * Wt.grad).tolist(), (bt - eta * bt.grad).tolist()


def generate(z, W, b, phi):
    """Eq. 6."""
    hidden = f(project(phi["Q"], z), W, b, phi["gain"], phi["bias"])
    post = layer_norm(hidden, phi["post_gain"], phi["post_bias"])
    return math.tanh(sum(o * a for o, a in zip(phi["O"], post, strict=True)))


class SlowMGG:
    """One coordinate's optimizer: appendix B.1, then Eqs. 3-6, then Eq. 2."""

    def __init__(self, theta, phi, lr, betas=(0.9, 0.99), eps=1e-8):
        self.theta, self.phi, self.lr, self.betas, self.eps = theta, phi, lr, betas, eps
        self.m = self.v = 0.0
        self.t = 0
        self.W = [list(row) for row in phi["W0"]]
        self.b = list(phi["b0"])

    def inputs(self, g):
        self.t += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        m_hat = self.m / (1 - self.betas[0] ** (self.t + 1))
        v_hat = self.v / (1 - self.betas[1] ** (self.t + 1))
        den = math.sqrt(v_hat) + self.eps
        return [m_hat / den, g / den]

    def step(self, g):
        z = self.inputs(g)
        self.W, self.b = memorise(z, self.W, self.b, self.phi)
        self.theta -= self.lr * generate(z, self.W, self.b, self.phi)


def objective(logits, features, mean, std, trade_off):
    """Eq. 7 over 64, the sigma of a batch of one left out."""
    n = len(logits)
    total = 0.0
    for row in logits.tolist():
        total += entropy(row) / n
    for f_, mu_s, sigma_s in zip(features, mean, std, strict=True):
        for j in range(f_.shape[1]):
            column = f_[:, j].tolist()
            mu = sum(column) / n
            total += trade_off / 64 * (mu - float(mu_s[j])) ** 2
            if n > 1:
                sigma = math.sqrt(sum((a - mu) ** 2 for a in column) / (n - 1))
                total += trade_off / 64 * (sigma - float(sigma_s[j])) ** 2
    return total
