"""The OpenAI-compatible HTTP server: the only home of asyncio, FastAPI, uvicorn and Prometheus."""
