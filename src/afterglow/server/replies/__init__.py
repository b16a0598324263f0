"""The replies to one HTTP request, from the requests of the engine to the written answer."""
