"""What the server does beside answering: watching its own event loop, a line of figures now and then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from .access_log import log_stats
from .service import Service


@contextlib.asynccontextmanager
async def run_in_background(service: Service) -> AsyncIterator[None]:
    """Runs tasks while the server runs.

    Args:
        service (`Service`):
            Whose metrics they are about.
    """
    jobs = [service.metrics.watch_event_loop()]
    if not service.settings.disable_log_stats:
        jobs.append(log_stats(service.metrics))
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
