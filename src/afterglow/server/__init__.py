"""The OpenAI-compatible HTTP server: the only home of asyncio, Starlette, uvicorn and Prometheus."""
