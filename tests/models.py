"""Small models for the tests, with everything that starts at zero randomised so that no variant hides."""

import torch

from nanochat.gpt import GPT, GPTConfig

SMALL = {"sequence_len": 16, "vocab_size": 50, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 32}


def build(seed=0, randomise=True, **fields):
    """A GPT on CPU in fp32 from SMALL and `fields`. `randomise`: projections, gates, coefficients and smear too."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**(SMALL | fields)))
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    if randomise:
        randomise_(model, seed)
    return model


@torch.no_grad()
def randomise_(model, seed=0, only_projections=False):
    """Random output projections and gates; unless `only_projections` also coefficients, smear and backout."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, p in model.named_parameters():
        if name.endswith("c_proj.weight") or "gate" in name:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        elif not only_projections and (name.endswith("_v") or name in ("smear_lambda", "backout_lambda")):
            p.copy_(torch.rand(p.shape, generator=generator) + 0.5)
        elif name == "lm_head.weight":
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def legal_points():
    """Every legal (source, combine, coeff, shared), written out from the definition of the axes."""
    points = [("residual", "replace", "scalar", False)]
    for combine in ("replace", "add"):
        for source in ("table", "x0", "first"):
            for coeff in ("fixed", "scalar", "head") + (("gate",) if source == "table" else ()):
                for shared in (False, True) if source == "table" else (False,):
                    points.append((source, combine, coeff, shared))
    return points
