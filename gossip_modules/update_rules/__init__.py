"""Update rules: rounds that take out of a model what uneven data puts into it."""
