"""The whole model once more, written plainly from its definition, for comparison."""

import torch


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def rotate(x, D):  # (T, D)
    angle = torch.outer(torch.arange(len(x)).float(), 100000.0 ** (-torch.arange(0, D, 2) / D))
    a, b = x[:, : D // 2], x[:, D // 2 :]
    return 1.2 * rms(torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], 1))


def token_value(c, w, p, i, key, kind, u, x0, first, token):
    """The value of one token in layer i, (H, D): u, x0, first are this token's vectors."""
    source, combine, coeff = kind
    own = w["attn.c_v.weight"] @ u if source == "residual" or combine == "add" else None
    s = {"residual": lambda: own, "first": lambda: first, "x0": lambda: w["attn.c_v.weight"] @ rms(x0),
         "table": lambda: p[f"value_embeds.{key}.weight"][token]}[source]().view(c.n_kv_head, -1)  # fmt: skip
    a, b = {
        "none": lambda: (0, 1),
        "fixed": lambda: (0.5, 0.5) if combine == "add" else (0, 1),
        "scalar": lambda: (w["attn.alpha_v"], w["attn.beta_v"]) if combine == "add" else (0, w["attn.gamma_v"]),
        "head": lambda: (w["attn.alpha_v"], w["attn.beta_v"]) if combine == "add" else (0, w["attn.lambda_v"]),
        "gate": lambda: (float(combine == "add"), 3 * torch.sigmoid(w["attn.ve_gate.weight"] @ u[:12])),
    }[coeff]()
    a, b = (torch.as_tensor(f).view(-1, 1) for f in (a, b))
    return b * s if combine == "replace" else a * own.view(c.n_kv_head, -1) + b * s


def reference_logits(p, c, ve_layers, bank_layers, windows, ids):
    """p: state dict, c: config, windows: left window per layer, ids: list of T tokens -> (T, vocab)."""
    T, N, D, r = len(ids), c.n_head, c.n_embd // c.n_head, c.n_head // c.n_kv_head
    x = e = rms(p["transformer.wte.weight"][ids])
    if c.smear:
        gate = p["smear_lambda"] * torch.sigmoid(e[1:, :24] @ p["smear_gate.weight"][0])
        x = torch.cat([e[:1], e[1:] + gate[:, None] * e[:-1]])
    x0, age = x, torch.arange(T)[:, None] - torch.arange(T)
    for i in range(c.n_layer):
        w = {name.split(f"h.{i}.")[1]: value for name, value in p.items() if f".h.{i}." in name}
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0 if c.trunk == "full" else x
        u = rms(x)
        first = u @ w["attn.c_v.weight"].T if i == 0 and "attn.c_v.weight" in w else first if i else [None] * T
        kind = ("table", "add", "gate") if i in ve_layers else ("residual", "replace", "none")
        kind = (c.bov_source, c.bov_combine, c.bov_coeff) if i in bank_layers else kind
        key = min(bank_layers) if i in bank_layers and c.bov_shared else i
        v = torch.stack([token_value(c, w, p, i, key, kind, u[t], x0[t], first[t], ids[t]) for t in range(T)])
        heads = []
        for n in range(N):
            q = rotate(u @ w["attn.c_q.weight"].view(N, D, -1)[n].T, D)
            k = rotate(u @ w["attn.c_k.weight"].view(N // r, D, -1)[n // r].T, D)
            scores = (q @ k.T / D**0.5).masked_fill((age < 0) | (age > windows[i]), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, n // r])
        x = x + torch.cat(heads, 1) @ w["attn.c_proj.weight"].T
        x = x + torch.relu(rms(x) @ w["mlp.c_fc.weight"].T).square() @ w["mlp.c_proj.weight"].T
        middle = x if i == c.n_layer // 2 else middle if i else None
    x = x - p["backout_lambda"] * middle if c.trunk == "full" else x
    return 15 * torch.tanh(rms(x) @ p["lm_head.weight"][: c.vocab_size].T / 15)
