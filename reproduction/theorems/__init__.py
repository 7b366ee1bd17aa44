"""The four theorems, measured: problems with known constants, simulations, verdicts, figures, the report's section."""
