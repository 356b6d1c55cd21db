"""`etude serve`: a model over HTTP, as OpenAI's clients and vLLM's token API ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import CacheFolder, Device  # noqa: TC001 - typer reads annotations at run time
from etude.errors import UserError
from etude.models.bases import locate
from etude.progress import Reporter


def serve(  # noqa: PLR0913, PLR0917 - an argument for every option
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model: run folder, model folder or base.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0 = any free port).")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; default: its folder's name.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token that clients must send.")] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="No token needed where others can reach it.")
    ] = False,
    max_queue: Annotated[int, typer.Option(min=1, help="Limit of requests, running and queued.")] = 256,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Size limit of a request in bytes.")] = 4 << 20,
    timeout: Annotated[float, typer.Option(min=0.001, help="Time limit of a request in seconds.")] = 600.0,
    context: Annotated[int | None, typer.Option(min=2, help="Context in tokens; default: the model's.")] = None,
    engine_memory: Annotated[
        float, typer.Option(min=0.0, help="KV cache in GB (0 = a share of the free memory).")
    ] = 0.0,
    lookup: Annotated[
        int, typer.Option(min=0, max=16, help="Draft tokens looked up in the request and the answer; 0: none.")
    ] = 0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for running requests to finish after SIGTERM.")] = 30,
    device: Device = "auto",
    weights: Annotated[Path | None, typer.Option(help="Folder of weight versions for POST /update_weights.")] = None,
    cache: CacheFolder = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /inference/v1/generate, /health, /metrics."""
    from etude.inference.http import Limits, bind, gate_for, server_of
    from etude.serve.process import read_token

    bounds = {"max_queue": max_queue, "max_request_bytes": max_request_bytes, "timeout": timeout, "drain": drain}
    limits = Limits.model_validate(bounds | {"context": context})
    gate = gate_for(host, read_token(token_file) if token_file else None, allow_open=allow_open)
    reporter = Reporter()
    if weights and not weights.is_dir():
        raise UserError(
            f"--weights {str(weights)!r} is not a folder; name the one that a trainer publishes versions in"
        )
    with bind(host, port) as address:
        if Path(model).is_dir():
            reporter.say(f"loading {model} …")
        from etude.inference.local import LocalPolicy
        from etude.inference.weight_sync import Receiver, WeightStore
        from etude.models.load import load_tokeniser
        from etude.serve.app import build_app
        from etude.serve.process import card_of

        called, folder, origin = locate(model, cache, reporter)
        card = card_of(name or called, folder, origin)
        held = int(engine_memory * 1e9) or None
        policy = LocalPolicy.open(
            folder, name=card.id, device=device, context=context, memory=held, lookup=lookup, say=reporter.say
        )
        receiver = Receiver(policy, WeightStore(weights, 1), reporter.say) if weights else None
        app = build_app(policy, load_tokeniser(folder), card, limits, gate, receiver)
        for duty in card.display:
            reporter.say(f"licence {duty['licence']}: {duty['duty']}")
        reporter.say(f"serving {card.id} at http://{host}:{address.getsockname()[1]}/v1; Ctrl-C ends it")
        server_of(app, limits).run(sockets=[address])
