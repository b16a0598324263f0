"""The replies to one HTTP request, from the requests of the engine to their text; `api` writes the answer."""
