"""Bank of Values: attention values read from a table row of the token (arXiv 2606.02780). Imports torch alone."""
