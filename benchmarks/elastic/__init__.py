"""How long training stands still when workers are killed and others train on."""
