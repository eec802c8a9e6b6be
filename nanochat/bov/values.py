"""Pure functions of the method: how a table starts and how a value is put together.

Shapes: B batch, T time, C n_embd, H kv heads, D head dim, V vocab.
"""

import torch
import torch.nn.functional as F

from nanochat.bov.spec import ValueSpec

GATE_CHANNELS = 12


def aligned_table(wte, w_v):
    """Rows W_V RMSNorm(wte[t]) in fp32 (section 4 of the paper): wte (V, C), w_v (H*D, C) -> (V, H*D).

    With it the first forward equals that of the x0 W_V variant.
    """
    return F.linear(F.rms_norm(wte.float(), (wte.size(-1),)), w_v.float())


def gate(x, weight):
    """3 sigmoid(w x[:12]): x (B, T, C), weight (H, 12) -> (B, T, H), in (0, 3)."""
    return 3 * torch.sigmoid(F.linear(x[..., :GATE_CHANNELS], weight.to(x.dtype)))


def mix(spec: ValueSpec, v, source, coefficients, gates=None):
    """The value of a layer, (B, T, H, D).

    v: x W_V (B, T, H, D), None for replace; source (B, T, H, D); coefficients: name -> (1,) or (H,); gates (B, T, H).
    """
    scale = {name: c.to(source.dtype).view(-1, 1) for name, c in coefficients.items()}
    if spec.combine == "replace":
        if spec.gated:
            return gates.unsqueeze(-1) * source
        for factor in scale.values():
            source = factor * source
        return source
    if spec.gated:
        return v + gates.unsqueeze(-1) * source
    if spec.coeff == "fixed":
        return 0.5 * v + 0.5 * source
    return scale["alpha_v"] * v + scale["beta_v"] * source
