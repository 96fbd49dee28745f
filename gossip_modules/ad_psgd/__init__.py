"""AD-PSGD: pairs of ranks average while both train."""
