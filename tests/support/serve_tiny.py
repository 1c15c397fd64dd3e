"""A server process: `serve_tiny.py FOLDER PORT DRAIN_S MODE...`, with the modes of `main`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from support.engines import tiny_client
from support.tiny import Tiny
from twostroke.core import env
from twostroke.core.errors import TwostrokeError
from twostroke.core.options import BatchOptions
from twostroke.engine.process.served import LocalEngine
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.run import serve
from twostroke.server.storage import Records


class DistantEngine(LocalEngine):
    """A server that accepts nothing, as while an engine is restarted."""

    async def generate(self, *_: Any) -> Any:
        print("asked", flush=True)
        await asyncio.Event().wait()


def main(folder: str, port: str, drain_s: str, *rest: str) -> int:
    """Serve; modes are `stuck`, `static`, `roomy`, `paced`, `records` and `away`."""
    keys = ApiKeys.read(None, None, router=env.replica_key())
    options = ServeOptions(port=int(port), drain_s=float(drain_s), api_keys=keys, coalesces=False)
    batch = BatchOptions(policy="static" if "static" in rest else "continuous", batch_size=4)
    tiny = Tiny(context_length=4096) if "roomy" in rest else None
    with ExitStack() as stack, tiny_client(Path(folder), tiny, batch=batch) as (client, backend):
        records_folder = Path(folder) / "records"
        records = (
            stack.enter_context(closing(Records(records_folder))) if "records" in rest else None
        )
        if "stuck" in rest:
            backend.gate.clear()
        if "paced" in rest:
            backend.pause_s = 0.04
        try:
            return serve(
                (DistantEngine if "away" in rest else LocalEngine)(client),
                options,
                on_ready=lambda url: print(url, flush=True),
                on_stop=lambda running: print(f"draining {running}", flush=True),
                records=records,
            )
        except TwostrokeError as error:
            print(error, flush=True)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
