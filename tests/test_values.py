"""Every point of the value axes: outputs, gradients, causality, table rows, initialisation."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from models import build, legal_points, randomise_
from nanochat.bov.layers import parse_layers
from nanochat.bov.presets import PRESETS, preset
from nanochat.engine import KVCache
from reference import reference_logits

WINDOWS = [2, 16, 3, 16]
LAYERS = {"last:1/3": {2, 3}, "every:2": {1, 3}, "all": {0, 1, 2, 3}, "none": set()}
IDS = [7, 3, 7, 49, 0, 3]


def cases():
    for n, (point, layers) in enumerate(itertools.product(legal_points(), ("last:1/3", "every:2", "all"))):
        source, combine, coeff, shared = point
        axes = {"bov_source": source, "bov_combine": combine, "bov_coeff": coeff, "bov_shared": shared}
        axes |= {"bov_layers": layers, "trunk": ("full", "plain")[n % 2], "smear": n % 3 > 0}
        axes |= {
            "ve_layers": ("every:2", "none")[n // 2 % 2],
            "n_kv_head": (2, 4, 1)[n % 3],
            "mlp_hidden": (0, 40)[n % 2],
        }
        yield pytest.param(axes, id=f"{source}-{combine}-{coeff}{'-shared' * shared}-{layers}")
    for trunk, smear, ve in itertools.product(("full", "plain"), (True, False), ("every:2", "none", "0,1")):
        yield pytest.param({"trunk": trunk, "smear": smear, "ve_layers": ve}, id=f"nobank-{trunk}-smear{smear}-{ve}")


def window(model):
    model.window_sizes = [(left, 0) for left in WINDOWS]
    return model


@pytest.mark.parametrize("axes", list(cases()))
def test_outputs_and_gradients_equal_the_naive_reference(axes):
    model = window(build(**axes))
    bank = LAYERS[axes.get("bov_layers", "none")] - ({0} if axes.get("bov_source") == "first" else set())
    ve = (LAYERS | {"0,1": {0, 1}})[axes["ve_layers"]] - bank
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_logits(params, model.config, ve, bank, WINDOWS, IDS)
    targets = torch.tensor([IDS[1:] + [5]])
    F.cross_entropy(expected, targets[0]).backward()
    logits = model(torch.tensor([IDS]))[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    model(torch.tensor([IDS]), targets).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, params[name].grad, rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("axes", list(cases()))
def test_causality_a_changed_suffix_moves_no_earlier_logit(axes):
    model = window(build(**axes))
    ids = torch.tensor([[7, 3, 7, 49, 0, 3, 11, 12]])
    changed = ids.clone()
    changed[0, 5:] = torch.tensor([1, 2, 4])
    before, after = model(ids)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize("axes", list(cases()))
def test_a_text_in_chunks_with_a_cache_equals_one_forward(axes):
    model = window(build(**axes))
    ids = torch.tensor([[7, 3, 7, 49, 0, 3, 11, 12, 5], [1, 1, 2, 3, 5, 8, 13, 21, 34]])
    config = model.config
    cache = KVCache(2, config.n_kv_head, 9, config.n_embd // config.n_head, config.n_layer, "cpu", torch.float32)
    chunks = [model(part, kv_cache=cache) for part in ids.split([4, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", list(cases()))
def test_every_parameter_has_one_group_of_its_kind_and_a_gradient(axes):
    model = build(**axes)
    optimizer = model.setup_optimizer(weight_decay=0.1)
    kinds = {}
    for group in optimizer.param_groups:
        for name in group["names"]:
            assert name not in kinds
            kinds[name] = (group["kind"], group["weight_decay"])
    assert kinds.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        matrix = name.startswith("transformer.h.") and p.ndim == 2
        assert kinds[name][0] == ("muon" if matrix else "adamw"), name
        if name.endswith(("gamma_v", "beta_v", "lambda_v")):
            assert kinds[name][1] == 0
    model(IDS2, IDS2.roll(-1, 1)).backward()
    optimizer.step()  # raises when a parameter has no gradient


@pytest.mark.parametrize("axes", [case for case in cases() if case.id.startswith("table")])
def test_table_gradient_only_on_rows_of_tokens_present(axes):
    model = build(**axes)
    ids = torch.tensor([[7, 3, 7, 49]])
    model(ids, torch.tensor([[3, 7, 49, 1]])).backward()
    for table in model.value_embeds.values():
        assert set(table.weight.grad.abs().sum(1).nonzero().flatten().tolist()) == {3, 7, 49}


def test_only_replacing_ungated_tables_need_no_value_cache():
    for source, combine, coeff, shared in legal_points():
        model = build(bov_layers="2,3", bov_source=source, bov_combine=combine, bov_coeff=coeff, bov_shared=shared)
        free = source == "table" and combine == "replace" and coeff != "gate"
        assert model.value_layers == ((0, 1) if free else (0, 1, 2, 3))


# ---------------------------------------------------------------------------- step 0


def step0(axes, seed=0):
    model = build(seed, randomise=False, **axes)
    randomise_(model, seed, only_projections=True)
    return model


IDS2 = torch.tensor([[7, 3, 7, 49, 0, 3, 11, 12], [1, 1, 2, 3, 5, 8, 13, 21]])


@pytest.mark.parametrize("source", ["table", "x0", "first"])
def test_at_step_0_learned_addition_equals_the_baseline(source):
    axes = preset("paper/baseline") | {"bov_layers": "last:1/3", "bov_source": source, "bov_combine": "add"}
    assert torch.equal(step0(axes)(IDS2), step0(preset("paper/baseline"))(IDS2))


def test_at_step_0_the_bank_equals_the_x0_projection():
    torch.testing.assert_close(step0(preset("paper/bov"))(IDS2), step0(preset("table1/9"))(IDS2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_shared_parameters_start_bit_equal_under_one_seed(name):
    one = build(3, randomise=False, **preset(name)).state_dict()
    for other_name in ("upstream", "paper/baseline", "matched/add_gate_last", "matched/replace_gate_every2"):
        other = build(3, randomise=False, **preset(other_name)).state_dict()
        for key in one.keys() & other.keys():
            if "value_embeds" not in key:
                assert torch.equal(one[key], other[key]), key


def test_smear_off_moves_no_other_parameter():
    on, off = (build(3, randomise=False, smear=s).state_dict() for s in (True, False))
    assert all(torch.equal(on[key], off[key]) for key in off)


@pytest.mark.parametrize("point", legal_points(), ids=str)
@pytest.mark.parametrize("trunk", ["full", "plain"])
def test_init_writes_every_parameter_and_buffer(point, trunk):
    source, combine, coeff, shared = point
    model = build(
        randomise=False, trunk=trunk, bov_layers="last:1/2", bov_source=source, bov_combine=combine, bov_coeff=coeff,
        bov_shared=shared,
    )  # fmt: skip
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for tensor in tensors.values():
        tensor.data.fill_(float("nan"))
    model.init_weights()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert not [name for name, tensor in tensors.items() if tensor.isnan().any()]


def test_aligned_table_is_the_projection_of_the_normed_embedding():
    bank = build(randomise=False, **preset("paper/bov"))
    x0 = build(randomise=False, **preset("table1/9"))
    for i in (2, 3):
        wte, w_v = x0.transformer.wte.weight, x0.transformer.h[i].attn.c_v.weight
        rows = (wte / (wte.square().mean(1, keepdim=True) + 1.2e-7).sqrt()) @ w_v.T
        torch.testing.assert_close(bank.value_embeds[str(i)].weight, rows, rtol=1e-5, atol=1e-6)


def test_a_shared_table_is_stored_once_and_aligned_to_the_first_bank_layer():
    shared, own = (build(randomise=False, **preset(n)) for n in ("fig5b/shared", "paper/bov"))
    assert [k for k in shared.state_dict() if "value_embeds" in k] == ["value_embeds.2.weight"]
    assert torch.equal(shared.value_embeds["2"].weight, own.value_embeds["2"].weight)
    assert shared.transformer.h[3].attn.bank.table is shared.value_embeds["2"]


# ---------------------------------------------------------------------------- grammar and contradictions


@pytest.mark.parametrize(
    ("text", "n_layer", "layers"),
    [
        ("none", 6, ()), ("all", 3, (0, 1, 2)), ("every:2", 6, (1, 3, 5)), ("every:2", 5, (0, 2, 4)),
        ("every:4", 12, (3, 7, 11)), ("last:1/3", 12, (8, 9, 10, 11)), ("last:1/3", 24, tuple(range(16, 24))),
        ("last:1/3", 4, (2, 3)), ("last:2/3", 6, (2, 3, 4, 5)), ("10, 8,9", 12, (8, 9, 10)),
    ],
)  # fmt: skip
def test_layer_grammar(text, n_layer, layers):
    assert parse_layers(text, n_layer) == layers


@pytest.mark.parametrize("text", ["", "some", "every:0", "last:0/3", "last:4/3", "last:1", "12", "-1", "1,,2", "1.5"])
def test_layer_grammar_refuses(text):
    with pytest.raises(ValueError, match="layer"):
        parse_layers(text, 12)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"bov_source": "residual", "bov_combine": "add"}, ("bov_source", "bov_combine")),
        ({"bov_source": "residual", "bov_coeff": "fixed"}, ("bov_source", "bov_coeff")),
        ({"bov_source": "residual", "bov_coeff": "head"}, ("bov_source", "bov_coeff")),
        ({"bov_source": "x0", "bov_shared": True}, ("bov_source", "bov_shared")),
        ({"bov_source": "x0", "bov_coeff": "gate"}, ("bov_source", "bov_coeff")),
        ({"bov_source": "first", "bov_layers": "0,3"}, ("bov_source", "bov_layers")),
        ({"bov_layers": "4"}, ("layer 4",)),
        ({"bov_source": "tables"}, ("bov_source", "table")),
    ],
    ids=str,
)
def test_contradictions_name_both_fields(axes, named):
    with pytest.raises(ValueError) as error:
        build(**({"bov_layers": "last:1/3"} | axes))
    assert all(word in str(error.value) for word in named)


@pytest.mark.parametrize("layers", ["all", "every:3"])
def test_first_leaves_layer_0_out_of_described_lists(layers):
    model = build(bov_layers=layers, bov_source="first")
    assert model.transformer.h[0].attn.bank.spec.source == "residual"
    assert model.transformer.h[3].attn.bank.spec.source == "first"


def test_presets_have_at_most_six_entries_and_build():
    for name, axes in PRESETS.items():
        assert len(axes) <= 6
        build(**preset(name))
    with pytest.raises(ValueError, match="paper/bov"):
        preset("paper/none")
