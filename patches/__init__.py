"""The Bank of Values for a checkout of upstream nanochat: a patch series, and commands that apply and regenerate it."""
