"""The journal: every input of the plan, one JSON object a line; recording and replay."""
