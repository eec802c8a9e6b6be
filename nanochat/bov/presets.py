"""Every row of the paper as a point on the axes: at most six entries each, everything else upstream's default."""

PLAIN = {"trunk": "plain", "ve_layers": "none"}


def _bank(layers="last:1/3", source="table", combine="replace", coeff="scalar", **more):
    axes = {"bov_layers": layers, "bov_source": source, "bov_combine": combine, "bov_coeff": coeff, **more}
    if source == "table":
        del axes["bov_source"]  # the default
    return PLAIN | axes


PRESETS = {
    "upstream": {},
    "paper/baseline": PLAIN,
    "paper/bov": PLAIN | {"bov_layers": "last:1/3"},
    # Table 1, p. 3
    "table1/1": PLAIN,
    "table1/2": _bank(source="residual"),
    "table1/3": _bank("all", "first", coeff="fixed"),
    "table1/4": _bank("every:2", "first"),
    "table1/5": _bank(source="first", coeff="fixed"),
    "table1/6": _bank(source="first"),
    "table1/7": _bank("every:2", "x0"),
    "table1/8": _bank(source="x0", coeff="fixed"),
    "table1/9": _bank(source="x0"),
    "table1/10": _bank(source="first", combine="add", coeff="fixed"),
    "table1/11": _bank(source="first", combine="add"),
    "table1/12": _bank(source="x0", combine="add", coeff="fixed"),
    "table1/13": _bank(source="x0", combine="add"),
    # Table 3, p. 7
    "table3/x0": _bank(source="x0"),
    "table3/v1": _bank(source="first"),
    "table3/v1_all": _bank("all", "first", coeff="fixed"),
    "table3/ve_gated": {"trunk": "plain", "ve_layers": "every:2"},
    # Figure 5(b), p. 8
    "fig5b/shared": PLAIN | {"bov_layers": "last:1/3", "bov_shared": True},
    "fig5b/no_coeff": _bank(coeff="fixed"),
    "fig5b/every_layer": _bank("all"),
    "fig5b/add_v": _bank(combine="add"),
    "fig5b/add_v_fixed": _bank(combine="add", coeff="fixed"),
    # replace against add under the same layers and coefficient
    **{
        f"matched/{combine}_{coeff}_{name}": _bank(layers, combine=combine, coeff=coeff)
        for combine in ("replace", "add")
        for coeff in ("scalar", "gate")
        for name, layers in (("last", "last:1/3"), ("every2", "every:2"))
    },
}


def preset(name: str) -> dict:
    """The axes of a preset; ValueError listing the names when there is none of that name."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r}: use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
