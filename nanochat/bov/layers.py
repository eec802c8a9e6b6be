"""The layer grammar: one string names a set of layers of a model of any depth."""

import re

GRAMMAR = "none, all, every:K, last:P/Q or a list such as 8,9,10,11"


def is_explicit(text: str) -> bool:
    """True when `text` lists layer numbers itself instead of describing them."""
    return text.strip()[:1].isdigit()


def parse_layers(text: str, n_layer: int) -> tuple[int, ...]:
    """Layer indices (0-based, ascending) that `text` names in a model of `n_layer` layers.

    every:K counts back from the last layer; last:P/Q is range((Q-P)*n//Q, n).
    Raises ValueError when the text is not of the grammar or names a layer that the model does not have.
    """
    text = text.strip()
    if text == "none":
        return ()
    if text == "all":
        return tuple(range(n_layer))
    if match := re.fullmatch(r"every:(\d+)", text):
        step = int(match[1])
        if step < 1:
            raise ValueError(f"layers {text!r}: K of every:K is at least 1")
        return tuple(i for i in range(n_layer) if (n_layer - 1 - i) % step == 0)
    if match := re.fullmatch(r"last:(\d+)/(\d+)", text):
        part, whole = int(match[1]), int(match[2])
        if not 1 <= part <= whole:
            raise ValueError(f"layers {text!r}: last:P/Q needs 1 <= P <= Q")
        return tuple(range((whole - part) * n_layer // whole, n_layer))
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        layers = sorted({int(number) for number in text.split(",")})
        if layers[-1] >= n_layer:
            raise ValueError(f"layers {text!r}: layer {layers[-1]} is not one of 0..{n_layer - 1}")
        return tuple(layers)
    raise ValueError(f"layers {text!r}: use {GRAMMAR}")
