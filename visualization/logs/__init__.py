"""What a run has left in its folder: tables, summary, and what is wrong with them."""
