"""The papers' figures and tables, made again."""
