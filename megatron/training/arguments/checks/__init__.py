"""One rule, one function; each yields sentences that name flags, values and the cure."""
