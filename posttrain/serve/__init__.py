"""`posttrain serve`: the rollout engine behind OpenAI's completions and chat routes.

    HTTP (asyncio) -> Job -> EngineThread (the one thread that touches the generator) -> tokens and completions -> JSON or SSE

Needs the extra `serve` (FastAPI, uvicorn); nothing else of posttrain imports this package.
"""
