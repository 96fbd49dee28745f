"""The adapter of dpwa, in the package where dpwa has it."""
