"""What the value of each layer is made of: source x combine x coefficient, decided when the model is built."""

from dataclasses import dataclass
from typing import Literal, get_args

from nanochat.bov.layers import is_explicit, parse_layers

Source = Literal["table", "x0", "first", "residual"]
Combine = Literal["replace", "add"]
Coeff = Literal["scalar", "fixed", "head", "gate"]
Trunk = Literal["full", "plain"]


@dataclass(frozen=True)
class ValueSpec:
    """The value of one layer, v = combine(x W_V, coeff * source).

    source:  table E_v[i] | x0 W_V | first = layer 0's W_V output | residual x W_V
    combine: replace = the source alone | add = beside x W_V
    coeff:   fixed | scalar | head = one per kv head | gate = 3 sigmoid(w x[:12]) per kv head
    table:   layer under whose key the table is stored, None without one
    """

    source: Source = "residual"
    combine: Combine = "replace"
    coeff: Coeff = "fixed"
    table: int | None = None

    @property
    def projects(self) -> bool:
        """Whether the layer has a W_V."""
        return self.combine == "add" or self.source in ("residual", "x0")

    @property
    def extra_projections(self) -> int:
        """Uses of W_V per token beyond the first (x0+add runs it on x and on x0)."""
        return 1 if (self.source, self.combine) == ("x0", "add") else 0

    @property
    def gated(self) -> bool:
        return self.coeff == "gate"

    @property
    def aligned(self) -> bool:
        """Whether the table starts as W_V RMSNorm(wte); the gated additive kind starts uniform, as upstream's."""
        return self.table is not None and (self.combine, self.coeff) != ("add", "gate")

    @property
    def caches_value(self) -> bool:
        """False where the value of a past token is a multiple, constant per head, of its table row."""
        return not (self.source == "table" and self.combine == "replace" and not self.gated)

    def coefficients(self, n_kv_head: int) -> dict[str, tuple[int, float]]:
        """Learned coefficients besides the gate: name -> (length, initial value)."""
        if self.coeff not in ("scalar", "head"):
            return {}
        size = 1 if self.coeff == "scalar" else n_kv_head
        if self.combine == "add":
            return {"alpha_v": (size, 1.0), "beta_v": (size, 0.0)}
        return {"gamma_v" if self.coeff == "scalar" else "lambda_v": (size, 1.0)}


PLAIN = ValueSpec()
GATED_EMBEDDING = ("table", "add", "gate")


def check_axes(config) -> None:
    """ValueError, naming both fields, when the bank axes of `config` contradict each other or hold an unknown word."""
    for field, kind in (("bov_source", Source), ("bov_combine", Combine), ("bov_coeff", Coeff), ("trunk", Trunk)):
        value = config[field]
        if value not in get_args(kind):
            raise ValueError(f"{field}={value!r}: use one of {', '.join(get_args(kind))}")
    source, combine, coeff = config["bov_source"], config["bov_combine"], config["bov_coeff"]
    if source == "residual" and combine == "add":
        raise ValueError("bov_source=residual with bov_combine=add adds x W_V to itself; use bov_combine=replace")
    if source == "residual" and coeff != "scalar":
        raise ValueError(f"bov_source=residual with bov_coeff={coeff}: only bov_coeff=scalar is defined")
    if config["bov_shared"] and source != "table":
        raise ValueError(f"bov_shared with bov_source={source}: only a table can be shared")
    if coeff == "gate" and source != "table":
        raise ValueError(f"bov_coeff=gate with bov_source={source}: only a table is gated")


def bank_layers(n_layer: int, axes: dict) -> tuple[int, ...]:
    """The layers with a bank. `first` leaves layer 0 out of described lists; ValueError when it is written out."""
    layers = parse_layers(axes["bov_layers"], n_layer)
    if axes["bov_source"] != "first" or 0 not in layers:
        return layers
    if is_explicit(axes["bov_layers"]):
        raise ValueError(f"bov_layers={axes['bov_layers']} with bov_source=first: layer 0 is the source itself")
    return layers[1:]


def layer_specs(n_layer: int, axes: dict) -> tuple[ValueSpec, ...]:
    """One ValueSpec per layer from the axes (fields of GPTConfig, see host.AXES); in both lists the bank wins.

    Raises ValueError on contradictory axes and unknown layers.
    """
    check_axes(axes)
    source = axes["bov_source"]
    bank = bank_layers(n_layer, axes)
    specs = [PLAIN] * n_layer
    for i in parse_layers(axes["ve_layers"], n_layer):
        specs[i] = ValueSpec(*GATED_EMBEDDING, table=i)
    for i in bank:
        table = None if source != "table" else bank[0] if axes["bov_shared"] else i
        specs[i] = ValueSpec(source, axes["bov_combine"], axes["bov_coeff"], table)
    return tuple(specs)
