"""The whole model once more, written plainly from its definition, for comparison."""

import torch


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def rotate(x, D):  # (T, D)
    angle = torch.outer(torch.arange(len(x)).float(), 100000.0 ** (-torch.arange(0, D, 2) / D))
    a, b = x[:, : D // 2], x[:, D // 2 :]
    return 1.2 * rms(torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], 1))


def token_value(w, source, combine, coeff, H, u, x0, first, row):  # one token's value (H, D) from its own vectors
    project = w.get("attn.c_v.weight")
    s = {"residual": lambda: project @ u, "first": lambda: first, "x0": lambda: project @ rms(x0), "table": lambda: row}
    one = torch.full((1,), 0.5 if (coeff, combine) == ("fixed", "add") else 1.0)
    a, b = w.get("attn.alpha_v", one), w.get("attn.beta_v", w.get("attn.gamma_v", w.get("attn.lambda_v", one)))
    b = 3 * torch.sigmoid(w["attn.ve_gate.weight"] @ u[:12]) if coeff == "gate" else b
    scaled = b.view(-1, 1) * s[source]().view(H, -1)
    return scaled if combine == "replace" else a.view(-1, 1) * (project @ u).view(H, -1) + scaled


def reference_logits(p, c, ve_layers, bank_layers, windows, ids):
    """p: state dict, c: config, windows: left window per layer, ids: list of T tokens -> (T, vocab)."""
    T, N, H, D, none = len(ids), c.n_head, c.n_kv_head, c.n_embd // c.n_head, [None] * len(ids)
    e = rms(p["transformer.wte.weight"][ids])
    gate = p["smear_lambda"] * torch.sigmoid(e[1:, :24] @ p["smear_gate.weight"].T) if c.smear else 0
    x = x0 = torch.cat([e[:1], e[1:] + gate * e[:-1]])
    age, first, middle = torch.arange(T)[:, None] - torch.arange(T), none, None
    for i in range(c.n_layer):
        w = {name.split(f"h.{i}.")[1]: value for name, value in p.items() if f".h.{i}." in name}
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0 if c.trunk == "full" else x
        u = rms(x)
        first = u @ w["attn.c_v.weight"].T if i == 0 and "attn.c_v.weight" in w else first
        kind = ("table", "add", "gate") if i in ve_layers else ("residual", "replace", "fixed")
        kind = (c.bov_source, c.bov_combine, c.bov_coeff) if i in bank_layers else kind
        key = min(bank_layers) if i in bank_layers and c.bov_shared else i
        rows = p[f"value_embeds.{key}.weight"][ids] if kind[0] == "table" else none
        v = torch.stack([token_value(w, *kind, H, u[t], x0[t], first[t], rows[t]) for t in range(T)])
        q, k = ([rotate(u @ a.T, D) for a in w[f"attn.c_{s}.weight"].view(-1, D, N * D)] for s in "qk")
        hidden = (age < 0) | (age > windows[i])
        scores = [(q[n] @ k[n * H // N].T / D**0.5).masked_fill(hidden, -torch.inf) for n in range(N)]
        heads = [scores[n].softmax(-1) @ v[:, n * H // N] for n in range(N)]
        x = x + torch.cat(heads, 1) @ w["attn.c_proj.weight"].T
        x = x + torch.relu(rms(x) @ w["mlp.c_fc.weight"].T).square() @ w["mlp.c_proj.weight"].T
        middle = x if i == c.n_layer // 2 else middle
    x = x - p["backout_lambda"] * middle if c.trunk == "full" else x
    return 15 * torch.tanh(rms(x) @ p["lm_head.weight"][: c.vocab_size].T / 15)
