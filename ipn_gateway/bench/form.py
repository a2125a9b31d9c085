"""The bare framework: FastAPI on uvicorn that parses a notification's form and answers, and does nothing else."""

import socket
from urllib.parse import parse_qsl

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

app = FastAPI()


@app.post("/ipn/{source}", response_model=None)
async def take(source: str, request: Request) -> JSONResponse:
    """Parse and answer."""
    form = dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))
    return JSONResponse({"delivery_id": form["tran_id"], "status": source})


def serve(application: FastAPI = app) -> None:
    """Serve an application on any free port, as the gateway serves its own: uvloop, httptools, no access log."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(1024)
    print(f"listens on http://127.0.0.1:{bound.getsockname()[1]}", flush=True)  # noqa: T201 - what its starter waits for
    uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False)).run(sockets=[bound])
