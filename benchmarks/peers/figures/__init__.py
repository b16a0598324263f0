"""One module per figure: `run(plan) -> (rows, notes)`, `goals(rows)`, `table(rows)`."""
