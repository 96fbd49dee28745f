"""Options of the scripts of SGP, MATCHA, WAGMA-SGD, PowerGossip and dpwa, and what they are called here."""
